"""The scheduler's side of cuts, in vLLM's block vocabulary."""

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.notice import Found, Swap
from vllm_kvselect.engine.sparse.names import sparse_names
from vllm_kvselect.engine.states.identity import StoreIdentity
from vllm_kvselect.engine.states.loads import ContextLoads
from vllm_kvselect.engine.states.names import StateNames, salts_of
from vllm_kvselect.engine.states.salted_hashes import salt_hashes
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.planning.plan import Plan, plan


class Planned(NamedTuple):
    """A request and what was decided about it, the same that workers make."""

    request: Request
    plan: Plan


class Sizes(NamedTuple):
    """Sizes of the layers that drop entries; those beside them may have blocks of another size.

    Tokens per block, and entries per page; None for those of a block.
    """

    block_size: int
    page_size: int | None


class PlannedManager(SingleTypeKVCacheManager):
    """What the managers of all groups share: cuts of requests, and what may be hashed of them.

    A request without cuts is treated as vLLM treats it. Every request is planned with its own
    settings. What is computed once entries are dropped is hashed up to the first cut that leaves
    no state: whoever finds it reads the same entries.

    Attributes:
        sizes: What requests are planned with.
        shares_states: Whether what cuts inside prompts leave is found by others. Layers beside
            those that drop entries have blocks of their own, which are not kept for it.
    """

    shares_states = False

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.eviction: EvictionConfig = kv_cache_spec.eviction
        self.sizes = Sizes(self.block_size, getattr(kv_cache_spec, "page_size", None))
        # Its settings are looked at once, not in each of its steps: a request may send many keys.
        self._planned: dict[str, Planned] = {}
        # While the scheduler schedules: what was hashed of each request before, in blocks.
        self._num_hashed_before: dict[str, int] | None = None

    def plan_of(self, request: Request) -> Plan:
        """The request's plan, remembered until its blocks are given back."""
        known = self._planned.get(request.request_id)
        if known is None:
            made = plan(
                self.eviction,
                request.sampling_params,
                request.prompt_token_ids,
                request.num_prompt_tokens,
                *self.sizes,
            )
            known = self._planned[request.request_id] = Planned(request, made)
        return known.plan

    def name_blocks(self, request: Request) -> None:
        """Renames the blocks that are not as in stock; called once, before it is scheduled."""
        made = self.plan_of(request)
        if self.shares_states:
            salt_hashes(request, salts_of(made, self.block_size))
        if made.segments is not None and request.block_hashes:
            request.block_hashes = sparse_names(
                request.block_hashes, self.block_pool.hash_block_size, made.segments, made.settings
            )

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Hashes full blocks that later requests may take for what they are named by.

        By default vLLM hashes of a sliding window only what the same prompt needs to resume just
        before its end, and may do so of states. With cuts it resumes before the first one.
        """
        made = self.plan_of(request)
        if (last := self._last_position(made)) is not None:
            if request.num_computed_tokens >= last:
                return
            num_tokens = min(num_tokens, last)
        if made.cuts:
            replay_boundaries = (*replay_boundaries, self.most_found(request))
        if self._num_hashed_before is not None:
            num_hashed = self.num_cached_block.get(request.request_id, 0)
            self._num_hashed_before.setdefault(request.request_id, num_hashed)
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )

    def _last_position(self, made: Plan) -> int | None:
        """Tokens up to which a request's blocks are hashed; None for all.

        From there on they can be read by none but the request.
        """
        num_states = made.num_states if self.shares_states else 0
        return made.cuts[num_states].position if num_states < len(made.cuts) else None

    def most_found(self, request: Request) -> int:
        """Tokens that a request may take from the prefix cache at most, before its first cut.

        A multiple of the block size, or all tokens without a cut.
        """
        made = self.plan_of(request)
        if not made.cuts:
            return request.num_tokens
        return made.cuts.most_found(self.sizes.block_size, made.settings.window)

    def new_step_starts(self) -> None:
        """Notes that the scheduler begins to schedule."""
        super().new_step_starts()
        self._num_hashed_before = {}

    def take_new_block_ids(self) -> list[int]:
        """vLLM's; it is called when the step is scheduled, and so will be computed."""
        self._num_hashed_before = None
        return super().take_new_block_ids()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets a request that ends or is preempted, and hashes of what will not be computed.

        vLLM hashes blocks when it schedules them. Under `--scheduling-policy priority` it may then
        preempt their request in the same step, and leaves hashes that find whatever is in there.
        """
        planned = self._planned.pop(request_id, None)
        # From 0.33 on vLLM returns them without the null blocks that stand before.
        table = self.req_to_blocks.get(request_id, [])
        num_computed = (self._num_hashed_before or {}).pop(request_id, None)
        if num_computed is not None:
            end = len(table)
            if planned and (last := self._last_position(planned.plan)) is not None:
                end = last // self.block_size
            self.block_pool.evict_blocks({block.block_id for block in table[num_computed:end]})
        return super().pop_blocks_for_free(request_id)


class HeadwiseManager(PlannedManager, FullAttentionManager):
    """Swaps blocks at cuts: gives back all that are before the tail, and takes fresh ones to pack.

    Blocks of the prompt are given back as they are, with their names. What is packed inside a
    prompt gets names, too, under which others find it.

    Attributes:
        names: Names of states.
        found: States that requests found when they last looked, by id.
        loads: Contexts on their way from a folder; None without one.
        num_ahead: As of `Cuts.most_held`.
    """

    num_ahead = 0

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.names = StateNames(self.block_pool, self.kv_cache_group_id, self.block_size)
        # Of the step that is being scheduled: its cuts, and which states of requests these leave.
        self._swaps: dict[str, Swap] = {}
        self._packed_now: dict[str, int] = {}
        self._named_now: dict[str, int] = {}
        # Blocks of what a newer state stands for, oldest first, with their names.
        self._superseded: dict[int, tuple[KVCacheBlock, BlockHashWithGroupId]] = {}
        self.found: dict[str, Found] = {}
        self.loads: ContextLoads | None = None
        store: StoreIdentity | None = kv_cache_spec.store
        if store is not None:
            self.loads = ContextLoads(self.eviction, store, self.block_pool, self.names)

    def find_state(self, request: Request, max_tokens: int | None = None) -> list[KVCacheBlock]:
        """Finds what an earlier request left of a request's beginning.

        Returns:
            The first blocks of its table, null blocks where entries were dropped; empty if no state
            is there.
        """
        made, request_id = self.plan_of(request), request.request_id
        self.found.pop(request_id, None)
        num_made, blocks = self.names.find(request, made)
        if not num_made or (max_tokens is not None and len(blocks) * self.block_size > max_tokens):
            return []
        first_packed = blocks[made.cuts[num_made - 1].num_freed].block_id
        self.found[request_id] = Found(num_made, first_packed)
        return blocks

    def is_on_its_way(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a running request makes the state that a request would look for next.

        Requests that come with the same beginning at once would all compute it.
        """
        made = self.plan_of(request)
        if (index := self.names.wanted(request, made)) is None:
            return False
        name, position = self.names.first_name(request, made, index), made.cuts[index].position
        return any(
            other.num_computed_tokens <= position
            and (plan := self.plan_of(other)).num_states > index
            and self.names.first_name(other, plan, index) == name
            for other in running
        )

    @property
    def loads_held(self) -> dict[str, list[KVCacheBlock]]:
        """Blocks that wait for a context from a folder, by a name for each load."""
        return {} if self.loads is None else self.loads.held

    def has_name(self, request: Request, index: int, block: KVCacheBlock) -> bool:
        """Whether a block has the name that is due at its place behind a request's first cut."""
        made = self.plan_of(request)
        last = self._last_position(made)
        if last is not None and index >= last // self.block_size:
            return False
        return self.names.is_named(request, made, index, block)

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Hashes full blocks, and names packed ones of states."""
        super().cache_blocks(request, *args, **kwargs)
        request_id = request.request_id
        if (index := self._packed_now.pop(request_id, None)) is not None:
            made, blocks = self.plan_of(request), self.req_to_blocks[request_id]
            if self.names.give(request, made, index, blocks):
                self._named_now[request_id] = index

    def new_step_starts(self) -> None:
        """Notes that the scheduler begins to schedule."""
        super().new_step_starts()
        self._packed_now.clear()
        self._named_now.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets a request, and the name of a state that its step would have packed.

        Nobody can have found it: requests that wait come after all that run.
        """
        index = self._named_now.pop(request_id, None)
        if self._num_hashed_before is not None and index is not None:
            self.names.take_back(*self._planned[request_id], index)
        self._packed_now.pop(request_id, None)
        self.names.forget(request_id)
        self.found.pop(request_id, None)
        if self.loads is not None:
            self.loads.forget(request_id)
        return super().pop_blocks_for_free(request_id)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """vLLM's, and what a cut that is due takes beyond what it gives back.

        Where it is asked for a whole request, no more than what is held of it at once. In a state
        that was found, null blocks stand for what was dropped.
        """
        if apply_admission_cap:
            planned, most = self._planned.get(request_id), None
            if planned and planned.plan.cuts:
                cuts, found = planned.plan.cuts, self.found.get(request_id)
                most = cuts.most_held(num_tokens, self.block_size, self.num_ahead)
                most += cuts[found.num_made - 1].num_freed if found else 0
            self.max_admission_blocks_per_request = most  # vLLM's word for it, of every request
        num_blocks: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            **kwargs,
        )
        if (cut := self._due_cut(request_id, num_tokens_main_model)) is not None:
            given_back = self.req_to_blocks[request_id][: cut.first_of_tail]
            num_freed = sum(block.ref_cnt == 1 and not block.is_null for block in given_back)
            # Never below 0: blocks of other groups may be taken before these are given back.
            num_blocks = max(0, num_blocks + cut.first_of_tail - cut.num_freed - num_freed)
        return num_blocks

    def allocate_new_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **more: Any
    ) -> None:
        """vLLM's; what is found is of use, whatever has taken its place for others."""
        for block in new_computed_blocks:
            self._superseded.pop(block.block_id, None)
        super().allocate_new_computed_blocks(request_id, new_computed_blocks, *args, **more)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """vLLM's, after the blocks of a cut that is due are swapped.

        What is given back keeps its hashes, so it serves others from the prefix cache until it is
        reused: perhaps for what this very cut packs. Workers make it before anything of the step is
        written, and after all that earlier steps read. vLLM is not told of the fresh blocks: it
        would append them to the table, and have them zeroed once they are packed.
        """
        if (cut := self._due_cut(request_id, num_tokens_main_model)) is not None:
            table = self.req_to_blocks[request_id]
            end = -(-cut.position // self.block_size)
            before, places = [block.block_id for block in table[:end]], slice(cut.first_of_tail)
            given_back = [block for block in table[places] if not block.is_null]
            self.block_pool.free_blocks(reversed(given_back))
            num_packed = cut.first_of_tail - cut.num_freed
            self._offer_superseded(num_packed)
            fresh = self.block_pool.get_new_blocks(num_packed)
            table[places] = [self._null_block] * cut.num_freed + fresh
            # Else what is packed would be hashed under the names of what was there.
            num_cached = self.num_cached_block.get(request_id, 0)
            self.num_cached_block[request_id] = max(num_cached, cut.first_of_tail)
            self._swaps[request_id] = Swap(before, [block.block_id for block in fresh])
            made = self._planned[request_id].plan
            index = made.cuts.index(cut)
            if self.shares_states and index < made.num_states:
                self._packed_now[request_id] = index
                # The new state stands for them, and would have to give way to them else.
                for block in reversed(given_back):
                    if block.block_hash is not None:
                        self._superseded[block.block_id] = block, block.block_hash
        num_more = -(-num_tokens // self.block_size) - len(self.req_to_blocks[request_id])
        self._offer_superseded(num_more)
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def take_swaps(self) -> dict[str, Swap]:
        """Blocks of the cuts that the scheduled step makes, in the order in which they are made."""
        swaps, self._swaps = self._swaps, {}
        return swaps

    def _due_cut(self, request_id: str, num_tokens: int) -> Cut | None:
        """The cut that is made before a request comes to some tokens, if it is not made already."""
        planned, table = self._planned.get(request_id), self.req_to_blocks.get(request_id)
        if planned is None or not table:
            return None
        cut = planned.plan.cuts.last_made(num_tokens - 1)
        return None if cut is None or table[cut.num_freed - 1].is_null else cut

    def num_usable(self, request: Request, num_found: int) -> int:
        """How many of the tokens that the prefix cache has are of use: no half of a segment."""
        segments = self.plan_of(request).segments
        return segments.last_border(num_found) if segments else num_found

    def _offer_superseded(self, num_blocks: int) -> None:
        """Puts blocks that a newer state stands for behind those that are free without a name.

        vLLM would reuse them last: they were given back last. What idle sessions have left would be
        gone before.
        """
        if num_blocks <= 0 or not self._superseded:
            return
        queue = self.block_pool.free_block_queue
        first = islice(queue.iter_blocks_after(None), num_blocks)
        nameless = [*takewhile(lambda block: block.block_hash is None, first)]
        offered: list[KVCacheBlock] = []
        while self._superseded and len(nameless) + len(offered) < num_blocks:
            block_id = next(iter(self._superseded))
            block, name = self._superseded.pop(block_id)
            if block.ref_cnt == 0 and block.block_hash == name:
                offered.append(block)
        for block in (*nameless, *offered):
            queue.remove(block)
        queue.prepend_n([*nameless, *offered])


class WindowManager(PlannedManager, SlidingWindowManager):
    """vLLM's manager of sliding-window layers, which drop nothing, beside layers that do."""


class StateManager(PlannedManager, MambaManager):
    """vLLM's manager of layers that keep a state in place of entries, likewise."""

    @property
    def keeps_states(self) -> bool:
        """Whether states are found by their hashes: those with which a chunk ended, at a border."""
        return self.enable_caching and self.mamba_cache_mode == "align"


def shares_states(kv: KVCacheManager, request: Request) -> bool:
    """Whether a request may read what others compressed, and they what it does."""
    return kv.prefix_cache_lookup_enabled(request) and headwise_manager(kv).shares_states


def headwise_manager(kv: KVCacheManager) -> HeadwiseManager:
    """The one manager of layers that drop entries (`models.refuse_mixed_groups`)."""
    (manager,) = (m for m in kv.coordinator.single_type_managers if isinstance(m, HeadwiseManager))
    return manager
