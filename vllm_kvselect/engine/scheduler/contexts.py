"""Compressed contexts that many requests read: names for their blocks in vLLM's prefix cache.

A request that marks a context drops entries at the context's last block border, whatever follows.
Its packed blocks are never written again, and so can be read by every request with the same context
and settings. They are found as vLLM finds any block: by a hash, under which the block pool keeps a
block for as long as nobody needs its memory. vLLM's own hash of a block stands for its tokens and
all before them, adapter and salt included; ours adds what was retained of them.
"""

import hashlib
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.planning.plan import Plan

_NOT_OF_THE_CHOICE = {
    "context",
    "turn_start",
    "allow_override",
    "check_integrity",
    "context_store",
    "context_store_bytes",
    "decode_attention",
}
"""Fields that do not change what is retained; the context counts by its cut."""


class Held(NamedTuple):
    """Compressed contexts in the pool.

    Attributes:
        num_contexts: How many.
        num_blocks: Blocks that they take.
    """

    num_contexts: int
    num_blocks: int


class ContextNames:
    """Names of the blocks of compressed contexts, and what is found under them.

    Packed blocks have names of ours, and were all packed for one request: what another one packed
    may differ by rounding. So have those behind them, unless they were computed before anything was
    dropped: these are as in any request, and have vLLM's own names. All up to the cut are found
    together or not at all. Those after the cut are found one after the other.

    Args:
        pool: vLLM's block pool.
        group_id: The group of layers.
        block_size: Tokens per block.
    """

    def __init__(self, pool: BlockPool, group_id: int, block_size: int) -> None:
        self._pool, self._group_id, self._block_size = pool, group_id, block_size
        # By request that shares: how many blocks of its table have their name, or never will.
        self._num_named: dict[str, int] = {}
        # By request: names of its blocks up to the cut: it may ask in every step that it waits.
        self._names_of: dict[str, list[BlockHash]] = {}
        # Contexts that may still be there, by their first names: how many blocks they take, and the
        # names of the last packed one and of the last one.
        self._given: dict[BlockHash, tuple[int, BlockHash, BlockHash]] = {}

    def find(self, request: Request, plan: Plan) -> list[KVCacheBlock]:
        """Finds a compressed context, and what follows it. What the request adds will be named.

        Args:
            request: The request about to be scheduled.
            plan: Its plan.

        Returns:
            The first blocks of its table, null blocks where entries were dropped. Empty if the
            context is not there. At least one token is left to compute.
        """
        self._num_named.setdefault(request.request_id, 0)
        cut = plan.context_cut
        num_known = (request.num_tokens - 1) // self._block_size
        border = cut.position // self._block_size
        if num_known < border:
            return []
        found = [self._cached(name) for name in self._names(request, plan)]
        blocks = [block for block in found if block is not None]
        if not blocks or len(blocks) < len(found):
            return []
        for index in range(border, num_known):
            block = self._cached(self._name(request, plan, index))
            if block is None:
                break
            blocks.append(block)
        return [self._pool.null_block] * cut.num_freed + blocks

    def is_there(self, request: Request, plan: Plan) -> bool:
        """Whether a request's context can be found."""
        return all(map(self._cached, self._names(request, plan)))

    def first_name(self, request: Request, plan: Plan) -> BlockHash:
        """The name of a context's first packed block, which stands for the context."""
        return self._names(request, plan)[0]

    def give(self, request: Request, plan: Plan, blocks: Sequence[KVCacheBlock]) -> bool:
        """Names those of a request's blocks that are computed and never written again.

        Computed is what earlier steps have: they are executed in order, so a step that is scheduled
        now reads what they leave. A step of the request packs the context at its beginning: so a
        request of that very step may read it.

        Args:
            request: The request.
            plan: Its plan.
            blocks: Its block table. Until the step that packs the context is scheduled, it has the
                blocks of the prompt.

        Returns:
            Whether its packed blocks have got their names now.
        """
        start, cut = self._num_named.get(request.request_id), plan.context_cut
        if start is None or request.num_computed_tokens < cut.position:
            return False
        is_new = start == 0
        if is_new and not blocks[cut.num_freed - 1].is_null:
            return False
        num_full = request.num_computed_tokens // self._block_size
        stop = min(num_full, len(blocks), len(request.block_hashes))
        if start == 0:
            start = self._give_whole(request, plan, blocks)
        for index in range(start, stop):
            name = self._name(request, plan, index)
            if blocks[index].block_hash is None and self._cached(name) is None:
                self._insert(name, blocks[index], index)
        self._num_named[request.request_id] = max(start, stop)
        return is_new and blocks[cut.num_freed].block_hash is not None

    def num_shared(self, plan: Plan) -> int:
        """Blocks that are found together: from the first packed one up to the cut."""
        cut = plan.context_cut
        return cut.position // self._block_size - cut.num_freed

    def take(self, request: Request, plan: Plan, blocks: Sequence[KVCacheBlock]) -> None:
        """Names blocks that were filled from elsewhere, unless there are others.

        Args:
            request: A request that may read them.
            plan: Its plan.
            blocks: Those of a whole context, from the first packed one up to the cut.
        """
        if not self.is_there(request, plan):
            self._name_shared(request, plan, blocks)

    def is_named(self, request: Request, plan: Plan, index: int, block: KVCacheBlock) -> bool:
        """Whether a block has the name that is due at its place, and nothing is written to it.

        Args:
            request: A request whose table holds it.
            plan: Its plan.
            index: The block's place.
            block: The block.
        """
        cut = plan.context_cut
        border = cut.position // self._block_size
        end = max(cut.position, (index + 1) * self._block_size)
        if request.num_computed_tokens < end or index >= len(request.block_hashes):
            return False
        if index < border:
            name = self._names(request, plan)[index - cut.num_freed]
        else:
            name = self._name(request, plan, index)
        return block.block_hash == make_block_hash_with_group_id(name, self._group_id)

    def held(self) -> Held:
        """Contexts that can be found now.

        The pool takes the last blocks of what was given back first: the last packed one and the
        last of all, which others may hold, stand for all.
        """
        gone = [
            first for first, (_, *last) in self._given.items() if not all(map(self._cached, last))
        ]
        for first in gone:
            del self._given[first]
        return Held(len(self._given), sum(num_blocks for num_blocks, *_ in self._given.values()))

    def take_back(self, request: Request, plan: Plan) -> None:
        """Takes the names from packed blocks whose step will not be computed."""
        self._given.pop(self.first_name(request, plan), None)
        self._forget_own(request, plan)

    def forget(self, request_id: str) -> None:
        """Forgets a request: what it has named stays, and it names no more."""
        self._num_named.pop(request_id, None)
        self._names_of.pop(request_id, None)

    def _give_whole(self, request: Request, plan: Plan, blocks: Sequence[KVCacheBlock]) -> int:
        """Names the blocks up to the cut, unless there are others.

        Returns:
            Index of the next block to name.
        """
        cut = plan.context_cut
        border = cut.position // self._block_size
        found = [self._cached(name) for name in self._names(request, plan)]
        if all(found):
            # Another request may have been faster: then all that this one computes stays private.
            return border if found[0] is blocks[cut.num_freed] else sys.maxsize
        self._name_shared(request, plan, blocks[cut.num_freed : border])
        return border

    def _name_shared(self, request: Request, plan: Plan, blocks: Sequence[KVCacheBlock]) -> None:
        """Names the blocks that are found together."""
        names, cut = self._names(request, plan), plan.context_cut
        first, num_packed = cut.num_freed, cut.first_of_tail - cut.num_freed
        self._forget_own(request, plan)
        for index, (name, block) in enumerate(zip(names, blocks, strict=True), first):
            if block.block_hash is None:
                self._insert(name, block, index)
        self._given[names[0]] = len(names), names[num_packed - 1], names[-1]

    def _forget_own(self, request: Request, plan: Plan) -> None:
        """Takes away the names of ours up to the cut: halves of two contexts must not be mixed."""
        vllms = {*request.block_hashes}
        found = [self._cached(name) for name in self._names(request, plan) if name not in vllms]
        self._pool.evict_blocks({block.block_id for block in found if block is not None})

    def _names(self, request: Request, plan: Plan) -> list[BlockHash]:
        """Names of the blocks from the first packed one up to the cut."""
        names = self._names_of.get(request.request_id)
        if names is None:
            cut, num_whole = plan.context_cut, plan.cuts.first_position // self._block_size
            border = cut.position // self._block_size
            whole = self._name(request, plan, border - 1)
            names = self._names_of[request.request_id] = [
                request.block_hashes[index]
                if cut.first_of_tail <= index < num_whole
                else BlockHash(hashlib.sha256(whole + index.to_bytes(8)).digest())
                for index in range(cut.num_freed, border)
            ]
        return names

    def _name(self, request: Request, plan: Plan, index: int) -> BlockHash:
        """The hash of a block and all before it, with what was retained of them."""
        settings = _settings_digest(plan.settings, plan.context_cut)
        return BlockHash(hashlib.sha256(settings + bytes(request.block_hashes[index])).digest())

    def _cached(self, name: BlockHash) -> KVCacheBlock | None:
        found = self._pool.get_cached_block(name, [self._group_id])
        return found[0] if found else None

    def _insert(self, name: BlockHash, block: KVCacheBlock, index: int) -> None:
        key = make_block_hash_with_group_id(name, self._group_id)
        block.set_block_hash(key, num_tokens=(index + 1) * self._block_size)
        self._pool.cached_block_hash_to_block.insert(key, block)


@lru_cache(maxsize=1024)
def _settings_digest(eviction: EvictionConfig, cut: Cut) -> bytes:
    return hashlib.sha256(settings_of_the_choice(eviction, cut).encode()).digest()


def settings_of_the_choice(eviction: EvictionConfig, cut: Cut, *but: str) -> str:
    """What decides what is retained of a context besides its tokens, as text.

    Args:
        eviction: The request's configuration.
        cut: The cut at the context's end.
        *but: Fields that are left out, too.
    """
    return f"{eviction.model_dump_json(exclude={*_NOT_OF_THE_CHOICE, *but})} {cut}"
