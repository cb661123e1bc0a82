"""The scheduler's side of cuts, in vLLM's block vocabulary."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.notice import Swap
from vllm_kvselect.engine.scheduler.contexts import ContextNames, Held
from vllm_kvselect.engine.scheduler.loads import ContextLoads
from vllm_kvselect.engine.scheduler.sparse_names import sparse_names
from vllm_kvselect.engine.store.identity import StoreIdentity
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.planning.plan import Plan, plan


class SpecWithEviction(Protocol):
    """What managers read of a group's spec beyond vLLM's own."""

    eviction: EvictionConfig


class SpecWithStore(SpecWithEviction, Protocol):
    """The same of layers that drop entries."""

    store: StoreIdentity | None


class Planned(NamedTuple):
    """A request and what was decided about it.

    Attributes:
        request: The request.
        plan: Its plan, the same that the workers compute.
    """

    request: Request
    plan: Plan


class Sizes(NamedTuple):
    """Sizes of the layers that drop entries; those beside them may have blocks of another size.

    Attributes:
        block_size: Tokens per block.
        page_size: Entries per page; None for those of a block.
    """

    block_size: int
    page_size: int | None


class PlannedManager(SingleTypeKVCacheManager):
    """What the managers of all groups share: cuts of requests, and what may be hashed of them.

    A request without cuts is treated as vLLM treats it. Every request is planned with its own
    settings. Nothing is hashed that is computed once entries are dropped: whoever found it would
    read other entries than its own.

    Args:
        kv_cache_spec: The group's spec, with the eviction configuration.
        **kwargs: vLLM's own arguments.

    Attributes:
        sizes: What requests are planned with.
    """

    def __init__(self, kv_cache_spec: SpecWithEviction, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.eviction = kv_cache_spec.eviction
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
        """Renames the blocks that a sparse prefill computes; called once, before it is scheduled.

        Args:
            request: A new request.
        """
        made = self.plan_of(request)
        if made.segments is not None and request.block_hashes:
            request.block_hashes = sparse_names(
                request.block_hashes,
                self.block_pool.hash_block_size,
                made.segments,
                made.settings,
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
        if request_cuts := self.plan_of(request).cuts:
            # Blocks that took the places of others must not get the names of these.
            if request.num_computed_tokens >= request_cuts.first_position:
                return
            num_tokens = min(num_tokens, request_cuts.first_position)
            replay_boundaries = (*replay_boundaries, self.most_found(request))
        if self._num_hashed_before is not None:
            num_hashed = self.num_cached_block.get(request.request_id, 0)
            self._num_hashed_before.setdefault(request.request_id, num_hashed)
        super().cache_blocks(
            request,
            num_tokens,
            retention_interval,
            replay_boundaries=replay_boundaries,
        )

    def most_found(self, request: Request) -> int:
        """Tokens that a request may take from the prefix cache at most.

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
            if planned and planned.plan.cuts:
                # Others are hashed, if at all, by `ContextNames`.
                end = planned.plan.cuts.first_position // self.block_size
            self.block_pool.evict_blocks({block.block_id for block in table[num_computed:end]})
        return super().pop_blocks_for_free(request_id)


class HeadwiseManager(PlannedManager, FullAttentionManager):
    """Swaps blocks at cuts: gives back all that are before the tail, and takes fresh ones to pack.

    Blocks of the prompt are given back as they are, with their names. Of what is packed, and of
    what is computed after it, only a marked context's is found by others.

    Args:
        kv_cache_spec: The group's spec, with the eviction configuration.
        **kwargs: vLLM's own arguments.

    Attributes:
        found: Tokens that requests found in a compressed context when they last looked, by id.
        loads: Contexts on their way from a folder; None without one.
        num_ahead: As of `Cuts.most_held`.
    """

    num_ahead = 0

    def __init__(self, kv_cache_spec: SpecWithStore, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._names = ContextNames(self.block_pool, self.kv_cache_group_id, self.block_size)
        # Of the step that is being scheduled: its cuts, and requests whose contexts these pack.
        self._swaps: dict[str, Swap] = {}
        self._packed_now: set[str] = set()
        self.found: dict[str, int] = {}
        self.loads: ContextLoads | None = None
        if (store := kv_cache_spec.store) is not None:
            self.loads = ContextLoads(self.eviction, store, self.block_pool, self._names)

    def context_of(self, request: Request) -> BlockHash | None:
        """The name of a request's compressed context, by which others find it; None without one."""
        made = self.plan_of(request)
        if not made.has_context:
            return None
        return self._names.first_name(request, made)

    def has_context(self, request: Request) -> bool:
        """Whether the compressed context that a request marks is there to be read."""
        return self._names.is_there(request, self.plan_of(request))

    def find_context(self, request: Request, max_tokens: int | None = None) -> list[KVCacheBlock]:
        """Finds what an earlier request left of a request's compressed context.

        Args:
            request: The request about to be scheduled, which takes what is found.
            max_tokens: Tokens that it may take; None for any.

        Returns:
            The first blocks of its table, null blocks where entries were dropped; empty if no
            context is marked, or it is not there.
        """
        made = self.plan_of(request)
        self.found.pop(request.request_id, None)
        if not made.has_context:
            return []
        blocks = self._names.find(request, made)
        if max_tokens is not None and len(blocks) * self.block_size > max_tokens:
            return []
        if blocks:
            self.found[request.request_id] = len(blocks) * self.block_size
        return blocks

    def must_wait_for_store(self, request: Request) -> bool:
        """Whether a request's context, which is not there, is on its way from a folder."""
        made = self.plan_of(request)
        return self.loads is not None and made.has_context and self.loads.must_wait(request, made)

    def name_to_store(self, request: Request) -> str | None:
        """The name under which a request's context is to be stored once it is compressed."""
        made = self.plan_of(request)
        if self.loads is None or not made.has_context or request.request_id in self.found:
            return None
        return self.loads.name_to_store(request, made)

    @property
    def loads_held(self) -> dict[str, list[KVCacheBlock]]:
        """Blocks that wait for a context from a folder, by a name for each load."""
        return {} if self.loads is None else self.loads.held

    def held_contexts(self) -> Held:
        """Compressed contexts that a request would find."""
        return self._names.held()

    def has_name_of_context(self, request: Request, index: int, block: KVCacheBlock) -> bool:
        """Whether a block has the name that is due at its place of a compressed context."""
        made = self.plan_of(request)
        if not made.has_context:
            return False
        return self._names.is_named(request, made, index, block)

    def disown(self, request_id: str) -> None:
        """Lets nobody find what a request computes from now on: it may be wrong."""
        self._names.forget(request_id)

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Hashes full blocks, and names those of contexts that earlier steps have computed."""
        super().cache_blocks(request, *args, **kwargs)
        if self._name_context(request, self.plan_of(request)):
            self._packed_now.add(request.request_id)

    def new_step_starts(self) -> None:
        """Notes that the scheduler begins to schedule."""
        super().new_step_starts()
        self._packed_now.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Names what a request leaves behind its context, and forgets the request.

        One that is preempted in the step that would have packed its context leaves nothing. Nobody
        can have found it: requests that wait come after all that run.
        """
        if planned := self._planned.get(request_id):
            if self._num_hashed_before is not None and request_id in self._packed_now:
                self._names.take_back(*planned)
            else:
                self._name_context(*planned)
        self._names.forget(request_id)
        self.found.pop(request_id, None)
        if self.loads is not None:
            self.loads.forget(request_id)
        return super().pop_blocks_for_free(request_id)

    def _name_context(self, request: Request, made: Plan) -> bool:
        blocks = self.req_to_blocks.get(request.request_id)
        if not blocks or not made.has_context:
            return False
        return self._names.give(request, made, blocks)

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

        Where it is asked for a whole request, no more than what is held of it at once. Of a context
        that was found, null blocks stand for what was dropped, and nothing follows.
        """
        if apply_admission_cap:
            planned, most = self._planned.get(request_id), None
            if planned and planned.plan.cuts and request_id not in self.found:
                most = planned.plan.cuts.most_held(num_tokens, self.block_size, self.num_ahead)
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
            fresh = self.block_pool.get_new_blocks(cut.first_of_tail - cut.num_freed)
            table[places] = [self._null_block] * cut.num_freed + fresh
            self._swaps[request_id] = Swap(before, [block.block_id for block in fresh])
            if self._planned[request_id].plan.has_context:
                # What is compressed takes its place, and would have to give way to it else.
                self._reuse_first(given_back)
        new_blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        return new_blocks

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
        """How many of the tokens that the prefix cache has are of use: no half of a segment.

        Args:
            request: The request about to be scheduled.
            num_found: Tokens found.
        """
        segments = self.plan_of(request).segments
        return segments.last_border(num_found) if segments else num_found

    def _reuse_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Puts blocks that nobody holds in front of all that are free, the last one first."""
        queue = self.block_pool.free_block_queue
        free = [block for block in reversed(blocks) if block.ref_cnt == 0]
        for block in free:
            queue.remove(block)
        queue.prepend_n(free)


class BystanderManager(PlannedManager):
    """What managers of layers share that drop nothing, beside those that do.

    They are vLLM's own. But what these layers compute of generated tokens depends on what the
    others dropped.
    """


class WindowManager(BystanderManager, SlidingWindowManager):
    """vLLM's manager of sliding-window layers, beside layers that drop entries."""


class StateManager(BystanderManager, MambaManager):
    """vLLM's manager of layers that keep a state in place of entries, likewise."""

    @property
    def keeps_states(self) -> bool:
        """Whether states are found by their hashes: those with which a chunk ended, at a border."""
        return self.enable_caching and self.mamba_cache_mode == "align"


def shares_contexts(kv: KVCacheManager, request: Request) -> bool:
    """Whether a request may read what others compressed, and they what it does.

    Layers beside full attention have blocks of their own, which are not kept for it.

    Args:
        kv: The KV cache manager.
        request: The request.
    """
    managers = kv.coordinator.single_type_managers
    return len(managers) == 1 and kv.prefix_cache_lookup_enabled(request)


def headwise_manager(kv: KVCacheManager) -> HeadwiseManager:
    """The one manager of layers that drop entries (`models.refuse_mixed_groups`)."""
    (manager,) = (m for m in kv.coordinator.single_type_managers if isinstance(m, HeadwiseManager))
    return manager
