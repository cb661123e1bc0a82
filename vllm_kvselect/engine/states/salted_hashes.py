"""Block hashes behind a cut, whose tokens read what it retained.

vLLM's hash of a block stands for its tokens and all before them, adapter and salt included. What is
computed after a cut depends on the settings, too. So behind it these are mixed in: the blocks are
vLLM's ordinary ones, under names that only requests with the same cuts come to.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


def salt_hashes(request: Request, salts: Mapping[int, bytes]) -> None:
    """Salts the hashes of a request's blocks, also of those to come. Called once, when it arrives.

    Each salt is mixed in from the hash of its index on, until the next one.
    """
    hasher = request._block_hasher
    if hasher is None or not salts:
        return
    chain, starts = list(request.block_hashes), sorted(salts)

    def named(index: int) -> BlockHash:
        place = bisect_right(starts, index)
        return salted(chain[index], salts[starts[place - 1]]) if place else chain[index]

    def hash_blocks(request: Request) -> list[BlockHash]:
        # vLLM makes each hash from the last, and has its hand on this list already.
        names, request.block_hashes = request.block_hashes, chain
        chain.extend(hasher(request))
        request.block_hashes = names
        return [named(index) for index in range(len(names), len(chain))]

    request._block_hasher = hash_blocks
    request.block_hashes[:] = [named(index) for index in range(len(chain))]


def salted(block_hash: bytes, salt: bytes) -> BlockHash:
    """A hash with something mixed in."""
    return BlockHash(hashlib.sha256(salt + block_hash).digest())
