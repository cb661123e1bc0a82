"""States: what a cut inside a prompt leaves, found by whoever begins with the same tokens.

What such a cut retains depends on the tokens before it and on the settings, and its packed blocks
are never written again. So they are found as vLLM finds any block: by a hash, under which the block
pool keeps a block for as long as nobody needs its memory. The next turn of a chat, another question
to the same text and a request that was preempted go on from there, and are cut again.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.states.salted_hashes import salted
from vllm_kvselect.metrics import States
from vllm_kvselect.planning.cuts import Cuts
from vllm_kvselect.planning.plan import Plan

_PLACE_BYTES = 4

_NOT_OF_THE_CHOICE = {
    "context",
    "allow_override",
    "check_integrity",
    "context_store",
    "context_store_bytes",
    "decode_attention",
}
"""Fields that do not change what is retained inside a prompt; the context counts by its cut."""


class StateNames:
    """Names of the packed blocks of states, and what is found under them.

    All packed blocks of a state were packed for one request: what another one packed may differ by
    rounding. They are found together with those behind them up to the cut, or not at all. Others
    have vLLM's names, which say what they were computed from (`salts_of`).

    Attributes:
        are_cut_again: Whether what is found may be cut again.
        has_new: Whether states were named since `held` was asked last.
    """

    are_cut_again = True
    has_new = False

    def __init__(self, pool: BlockPool, group_id: int, block_size: int) -> None:
        self._pool, self._group_id, self._block_size = pool, group_id, block_size
        # Requests whose packed blocks are to get their names.
        self._sharing: set[str] = set()
        # By request, what the names of each of its states begin with: it may ask in every step
        # that it waits.
        self._of_states: dict[str, list[bytes]] = {}
        # By request that waits: the state that it looked for last.
        self._wanted: dict[str, int] = {}
        # States that may still be there, by their first names: how many blocks they take, and the
        # names of the last packed one and of the last one.
        self._given: dict[BlockHash, tuple[int, BlockHash, BlockHash]] = {}
        if pool.enable_kv_cache_events:
            _announce_no_states(pool)

    def find(self, request: Request, plan: Plan) -> tuple[int, list[KVCacheBlock]]:
        """Finds the last state that is there, and what follows it. What the request packs is named.

        At least one token is left to compute, and all that the next cut looks through.

        Returns:
            Cuts that are made of the request's beginning, 0 if no state is there; the first blocks
            of its table, null blocks where entries were dropped.
        """
        self._sharing.add(request.request_id)
        for index in reversed(range(plan.num_states)):
            cut, end = plan.cuts[index], self._most_blocks(request, plan, index)
            border = self._border(plan, index)
            if border > end or self._cached(self.first_name(request, plan, index)) is None:
                continue
            found = [self._cached(name) for name in self._names(request, plan, index)]
            blocks = [block for block in found if block is not None]
            if len(blocks) < len(found):
                continue
            for name in request.block_hashes[border:end]:
                block = self._cached(name)
                if block is None:
                    break
                blocks.append(block)
            return index + 1, [self._pool.null_block] * cut.num_freed + blocks
        return 0, []

    def is_there(self, request: Request, plan: Plan, index: int) -> bool:
        """Whether a state can be found."""
        is_begun = self._cached(self.first_name(request, plan, index)) is not None
        return is_begun and all(map(self._cached, self._names(request, plan, index)))

    def wanted(self, request: Request, plan: Plan) -> int | None:
        """Which of its states a request would go on from next if it were there; None for none.

        Asked in each step that the request waits: then only what was not there is looked for.
        """
        end = plan.num_states
        while end and self._border(plan, end - 1) > self._most_blocks(request, plan, end - 1):
            end -= 1
        index = self._wanted.get(request.request_id)
        if index is None:
            there = (each for each in reversed(range(end)) if self.is_there(request, plan, each))
            index = next(there, -1) + 1
        while index < end and self.is_there(request, plan, index):
            index += 1
        self._wanted[request.request_id] = index
        return index if index < end else None

    def first_name(self, request: Request, plan: Plan, index: int) -> BlockHash:
        """The name of a state's first packed block, which stands for the state."""
        return _packed_name(self._begin(request, plan)[index], plan.cuts[index].num_freed)

    def give(
        self, request: Request, plan: Plan, index: int, blocks: Sequence[KVCacheBlock]
    ) -> bool:
        """Names the packed blocks of a state that a request leaves, unless there are others.

        A step of the request packs them at its beginning: so a request of that very step may read
        them. Says whether they have got their names now.
        """
        if request.request_id not in self._sharing or self.is_there(request, plan, index):
            return False
        freed = plan.cuts[index].num_freed
        self._name_all(request, plan, index, blocks[freed : freed + self.num_shared(plan, index)])
        return True

    def num_shared(self, plan: Plan, index: int) -> int:
        """Blocks that are found together: from the first packed one up to the cut."""
        return self._border(plan, index) - plan.cuts[index].num_freed

    def take(self, request: Request, plan: Plan, index: int, blocks: list[KVCacheBlock]) -> None:
        """Names blocks that were filled from elsewhere, unless there are others.

        They are those of the whole state, from the first packed one up to the cut.
        """
        if not self.is_there(request, plan, index):
            self._name_all(request, plan, index, blocks)

    def is_named(self, request: Request, plan: Plan, index: int, block: KVCacheBlock) -> bool:
        """Whether a block has the name that is due at its place in a request's block table."""
        end = (index + 1) * self._block_size
        if request.num_computed_tokens < end or index >= len(request.block_hashes):
            return False
        name = request.block_hashes[index]
        num_made = plan.cuts.num_made(request.num_computed_tokens - 1)
        if num_made and index < (made := plan.cuts[num_made - 1]).first_of_tail:
            if num_made > plan.num_states:
                return False
            name = self._names(request, plan, num_made - 1)[index - made.num_freed]
        return block.block_hash == make_block_hash_with_group_id(name, self._group_id)

    def held(self) -> States:
        """States that can be found now.

        The pool takes the last blocks of what was given back first: the last packed one and the
        last of all, which others may hold, stand for all.
        """
        gone = [
            first for first, (_, *last) in self._given.items() if not all(map(self._cached, last))
        ]
        for first in gone:
            del self._given[first]
        self.has_new = False
        return States(len(self._given), sum(num_blocks for num_blocks, *_ in self._given.values()))

    def take_back(self, request: Request, plan: Plan, index: int) -> None:
        """Takes the names from packed blocks whose step will not be computed."""
        self._given.pop(self.first_name(request, plan, index), None)
        self._forget_packed(request, plan, index)

    def forget(self, request_id: str) -> None:
        """Forgets a request: what it has named stays, and it names no more."""
        self._sharing.discard(request_id)
        self._of_states.pop(request_id, None)
        self._wanted.pop(request_id, None)

    def _border(self, plan: Plan, index: int) -> int:
        """Blocks before the cut that leaves a state."""
        return plan.cuts[index].position // self._block_size

    def _most_blocks(self, request: Request, plan: Plan, index: int) -> int:
        """Blocks that a request may take at most from a state on; -1 if not even these."""
        most = request.num_tokens - 1
        if index + 1 < len(plan.cuts):
            if not self.are_cut_again:
                return -1
            window = plan.settings.window
            most = min(most, plan.cuts.most_found(self._block_size, window, index + 1))
        return most // self._block_size

    def _name_all(
        self, request: Request, plan: Plan, index: int, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Names the blocks that are found together."""
        names, cut = self._names(request, plan, index), plan.cuts[index]
        first, num_packed = cut.num_freed, cut.first_of_tail - cut.num_freed
        self._forget_packed(request, plan, index)
        for place, (name, block) in enumerate(zip(names, blocks, strict=True), first):
            if block.block_hash is None:
                self._insert(name, block, place)
        self.has_new = True
        self._given[names[0]] = len(names), names[num_packed - 1], names[-1]

    def _forget_packed(self, request: Request, plan: Plan, index: int) -> None:
        """Takes away the names of packed blocks: halves of two states must not be mixed."""
        cut = plan.cuts[index]
        names = self._names(request, plan, index)[: cut.first_of_tail - cut.num_freed]
        found = [self._cached(name) for name in names]
        self._pool.evict_blocks({block.block_id for block in found if block is not None})

    def _begin(self, request: Request, plan: Plan) -> list[bytes]:
        """What the names of each of a request's states begin with."""
        known = self._of_states.get(request.request_id)
        if known is None:
            known = self._of_states[request.request_id] = [
                salted(request.block_hashes[cut.position // self._block_size - 1], salt)
                for cut, salt in zip(
                    plan.cuts, salts_of(plan, self._block_size).values(), strict=False
                )
            ]
        return known

    def _names(self, request: Request, plan: Plan, index: int) -> list[BlockHash]:
        """Names of the blocks of a state, from the first packed one up to its cut."""
        cut, begin = plan.cuts[index], self._begin(request, plan)[index]
        packed = [_packed_name(begin, each) for each in range(cut.num_freed, cut.first_of_tail)]
        tail = request.block_hashes[cut.first_of_tail : self._border(plan, index)]
        return [*packed, *tail]

    def _cached(self, name: BlockHash) -> KVCacheBlock | None:
        found = self._pool.get_cached_block(name, [self._group_id])
        return found[0] if found else None

    def _insert(self, name: BlockHash, block: KVCacheBlock, index: int) -> None:
        key = make_block_hash_with_group_id(name, self._group_id)
        block.set_block_hash(key, num_tokens=(index + 1) * self._block_size)
        self._pool.cached_block_hash_to_block.insert(key, block)


def _packed_name(begin: bytes, index: int) -> BlockHash:
    """The name of a packed block by its place in the block table, longer than any hash."""
    return BlockHash(begin + index.to_bytes(_PLACE_BYTES))


def _announce_no_states(pool: BlockPool) -> None:
    """Keeps the removal of packed blocks out of KV events: no event could say that they are there.

    An event names a block by its tokens, and has all blocks before it there, too.
    """
    emit = pool._emit_block_removed_events

    def emit_of_others(names: list[BlockHashWithGroupId]) -> None:
        length = sha256().digest_size + _PLACE_BYTES
        emit([name for name in names if len(get_block_hash(name)) != length])

    pool._emit_block_removed_events = emit_of_others


def salts_of(plan: Plan, hash_size: int) -> dict[int, bytes]:
    """What is mixed into block hashes behind the cuts of a prompt; see `salt_hashes`.

    Returns:
        By the index of the first hash whose tokens do not all come before a cut: what decided that
        cut and all before it. One for each cut that leaves a state.
    """
    return dict(_salts(plan.settings, Cuts(plan.cuts[: plan.num_states]), hash_size))


@lru_cache(maxsize=1024)
def _salts(eviction: EvictionConfig, cuts: Cuts, hash_size: int) -> tuple[tuple[int, bytes], ...]:
    salts, salt = [], settings_of_the_choice(eviction).encode()
    for cut in cuts:
        salt = sha256(salt + str(cut).encode()).digest()
        salts.append((cut.position // hash_size, salt))
    return tuple(salts)


def settings_of_the_choice(eviction: EvictionConfig, *but: str) -> str:
    """What decides what is retained inside a prompt besides its tokens and its cuts, as text.

    `but` are fields that are left out, too.
    """
    return eviction.model_dump_json(exclude={*_NOT_OF_THE_CHOICE, *but})
