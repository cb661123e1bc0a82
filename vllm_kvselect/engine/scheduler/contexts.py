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

    The blocks from the first packed one up to the cut are found together or not at all, and all of
    them were packed for one request: what another one packed may differ by rounding. Those after
    the cut were computed from what is retained, and are found one after the other.

    Args:
        pool: vLLM's block pool.
        group_id: The group of layers.
        block_size: Tokens per block.
    """

    def __init__(self, pool: BlockPool, group_id: int, block_size: int) -> None:
        self._pool, self._group_id, self._block_size = pool, group_id, block_size
        # By request that shares: how many blocks of its table have their name, or never will.
        self._num_named: dict[str, int] = {}
        # By request: names of its packed blocks, since it may ask in every step that it waits.
        self._names_of: dict[str, list[BlockHash]] = {}
        # Names of the packed blocks of contexts that may still be there, by the first of them.
        self._given: dict[BlockHash, list[BlockHash]] = {}

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
        found = [self._cached(name) for name in self._packed_names(request, plan)]
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
        """Whether the packed blocks of a request's context can be found."""
        return all(map(self._cached, self._packed_names(request, plan)))

    def first_name(self, request: Request, plan: Plan) -> BlockHash:
        """The name of a context's first packed block, which stands for the context."""
        return self._packed_names(request, plan)[0]

    def give(
        self,
        request: Request,
        plan: Plan,
        blocks: Sequence[KVCacheBlock],
        is_scheduled: bool,
    ) -> bool:
        """Names those of a request's blocks that are computed and never written again.

        Computed is what earlier steps have: they are executed in order, so a step that is scheduled
        now reads what they leave. A step of the request packs the context at its beginning: so a
        request of that very step may read it.

        Args:
            request: The request.
            plan: Its plan.
            blocks: Its block table.
            is_scheduled: Whether a step of the request is scheduled; without one nothing is packed.

        Returns:
            Whether its packed blocks have got their names now.
        """
        start, cut = self._num_named.get(request.request_id), plan.context_cut
        if start is None or request.num_computed_tokens < cut.position:
            return False
        is_new = start == 0
        if is_new and not is_scheduled:
            return False
        num_full = request.num_computed_tokens // self._block_size
        stop = min(num_full, len(blocks), len(request.block_hashes))
        if start == 0:
            start = self._give_packed(request, plan, blocks)
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
            name = self._packed_names(request, plan)[index - cut.num_freed]
        else:
            name = self._name(request, plan, index)
        return block.block_hash == make_block_hash_with_group_id(name, self._group_id)

    def held(self) -> Held:
        """Contexts that can be found now.

        The pool takes the last blocks of what was given back first, so the last one stands for all.
        """
        gone = [first for first, names in self._given.items() if self._cached(names[-1]) is None]
        for first in gone:
            del self._given[first]
        return Held(len(self._given), sum(map(len, self._given.values())))

    def take_back(self, request: Request, plan: Plan) -> None:
        """Takes the names from packed blocks whose step will not be computed."""
        self._given.pop(self.first_name(request, plan), None)
        named = map(self._cached, self._packed_names(request, plan))
        self._pool.evict_blocks({block.block_id for block in named if block is not None})

    def forget(self, request_id: str) -> None:
        """Forgets a request: what it has named stays, and it names no more."""
        self._num_named.pop(request_id, None)
        self._names_of.pop(request_id, None)

    def _give_packed(self, request: Request, plan: Plan, blocks: Sequence[KVCacheBlock]) -> int:
        """Names the packed blocks, unless there are others.

        Returns:
            Index of the next block to name.
        """
        cut = plan.context_cut
        border = cut.position // self._block_size
        names = self._packed_names(request, plan)
        found = [self._cached(name) for name in names]
        if all(found):
            # Another request may have been faster: then all that this one computes stays private.
            return border if found[0] is blocks[cut.num_freed] else sys.maxsize
        self._name_shared(request, plan, blocks[cut.num_freed : border])
        return border

    def _name_shared(self, request: Request, plan: Plan, blocks: Sequence[KVCacheBlock]) -> None:
        """Names the blocks that are found together."""
        names, first = self._packed_names(request, plan), plan.context_cut.num_freed
        # Half of a context is of no use, and must not be mixed with another's half.
        found = map(self._cached, names)
        self._pool.evict_blocks({block.block_id for block in found if block is not None})
        for index, (name, block) in enumerate(zip(names, blocks, strict=True), first):
            self._insert(name, block, index)
        self._given[names[0]] = names

    def _packed_names(self, request: Request, plan: Plan) -> list[BlockHash]:
        """Names of the blocks from the first packed one up to the cut."""
        names = self._names_of.get(request.request_id)
        if names is None:
            cut = plan.context_cut
            border = cut.position // self._block_size
            whole = self._name(request, plan, border - 1)
            names = self._names_of[request.request_id] = [
                BlockHash(hashlib.sha256(whole + index.to_bytes(8)).digest())
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
