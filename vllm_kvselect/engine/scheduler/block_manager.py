"""The scheduler's side of cuts, in vLLM's block vocabulary."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.scheduler.contexts import ContextNames, Held
from vllm_kvselect.engine.scheduler.sparse_names import sparse_names
from vllm_kvselect.methods.registry import METHODS
from vllm_kvselect.prefilling.segments import Segments, sparse_segments
from vllm_kvselect.request import planned_config
from vllm_kvselect.retention import Cuts, cuts
from vllm_kvselect.turns import with_context

if TYPE_CHECKING:
    from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec, WindowSpec


class Planned(NamedTuple):
    """What a request's settings come to.

    Attributes:
        request: The request.
        eviction: Its own configuration.
        cuts: Its cuts.
        segments: The segments of its prompt that are prefilled sparsely, or None.
    """

    request: Request
    eviction: EvictionConfig
    cuts: Cuts
    segments: Segments | None = None

    @property
    def has_context(self) -> bool:
        """Whether entries of a marked context are dropped."""
        return bool(self.cuts) and self.eviction.context is not None


class PlannedManager(SingleTypeKVCacheManager):
    """What the managers of all groups share: cuts of requests, and what may be hashed of them.

    A request without cuts is treated as vLLM treats it. Every request is planned with its own
    settings.

    Args:
        kv_cache_spec: The group's spec, with the eviction configuration.
        **kwargs: vLLM's own arguments.
    """

    def __init__(self, kv_cache_spec: "HeadwiseSpec | WindowSpec", **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.eviction = kv_cache_spec.eviction
        # Its settings are looked at once, not in each of its steps: a request may send many keys.
        self._planned: dict[str, Planned] = {}
        # While the scheduler schedules: what was hashed of each request before, in blocks.
        self._num_hashed_before: dict[str, int] | None = None

    def cuts_of(self, request: Request) -> Cuts:
        """The request's cuts, the same that the workers compute.

        The prompt's length counts: a preempted request resumes with more tokens than its prompt,
        but its cuts are still the same.
        """
        return self._planned_of(request).cuts

    def segments_of(self, request: Request) -> Segments | None:
        """The segments of the request that are prefilled sparsely, the same as in the workers."""
        return self._planned_of(request).segments

    def name_blocks(self, request: Request) -> None:
        """Renames the blocks that a sparse prefill computes; called once, before it is scheduled.

        Args:
            request: A new request.
        """
        planned = self._planned_of(request)
        if planned.segments is not None and request.block_hashes:
            request.block_hashes = sparse_names(
                request.block_hashes,
                self.block_pool.hash_block_size,
                planned.segments,
                planned.eviction,
            )

    def _planned_of(self, request: Request) -> Planned:
        """The request's configuration and cuts, remembered until its blocks are given back."""
        known = self._planned.get(request.request_id)
        if known is None:
            eviction = with_context(
                self._eviction_of(request), request.prompt_token_ids, self.block_size
            )
            request_cuts = cuts(
                request.num_prompt_tokens, self.block_size, eviction, request.max_tokens
            )
            segments = sparse_segments(request.num_prompt_tokens, request_cuts, eviction)
            known = Planned(request, eviction, request_cuts, segments)
            self._planned[request.request_id] = known
        return known

    def _eviction_of(self, request: Request) -> EvictionConfig:
        """The request's own configuration."""
        return planned_config(self.eviction, request.sampling_params)

    def _num_hashable(self, request_cuts: Cuts) -> int:
        """Tokens of a request with cuts whose blocks may be hashed."""
        raise NotImplementedError

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
        before its end. With cuts it resumes at the first private block instead.
        """
        if self._num_hashed_before is not None:
            num_hashed = self.num_cached_block.get(request.request_id, 0)
            self._num_hashed_before.setdefault(request.request_id, num_hashed)
        if request_cuts := self.cuts_of(request):
            num_tokens = min(num_tokens, self._num_hashable(request_cuts))
            first_private = request_cuts.first_private * self.block_size
            replay_boundaries = (*replay_boundaries, first_private)
        super().cache_blocks(
            request,
            num_tokens,
            retention_interval,
            replay_boundaries=replay_boundaries,
        )

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
            if planned and planned.cuts:
                # Others are hashed, if at all, by `ContextNames`, which waits for the step.
                end = self._num_hashable(planned.cuts) // self.block_size
            self.block_pool.evict_blocks({block.block_id for block in table[num_computed:end]})
        return super().pop_blocks_for_free(request_id)


class HeadwiseManager(PlannedManager, FullAttentionManager):
    """Frees the blocks before the packed ones and keeps the others private.

    Only those of a marked context, and what follows it, are shared once they are packed.

    Args:
        kv_cache_spec: The group's spec, with the eviction configuration.
        **kwargs: vLLM's own arguments.
    """

    def __init__(self, kv_cache_spec: "HeadwiseSpec", **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._names = ContextNames(self.block_pool, self.kv_cache_group_id, self.block_size)

    def context_of(self, request: Request) -> BlockHash | None:
        """The name of a request's compressed context, by which others find it; None without one."""
        planned = self._planned_of(request)
        if not planned.has_context:
            return None
        return self._names.first_name(request, planned.eviction, planned.cuts[0])

    def has_context(self, request: Request) -> bool:
        """Whether the compressed context that a request marks is there to be read."""
        planned = self._planned_of(request)
        return self._names.is_there(request, planned.eviction, planned.cuts[0])

    def find_context(self, request: Request) -> list[KVCacheBlock]:
        """Finds what an earlier request left of a request's compressed context.

        Args:
            request: The request about to be scheduled.

        Returns:
            The first blocks of its table, null blocks where entries were dropped; empty if no
            context is marked, or it is not there.
        """
        planned = self._planned_of(request)
        if not planned.has_context:
            return []
        return self._names.find(request, planned.eviction, planned.cuts[0])

    def held_contexts(self) -> Held:
        """Compressed contexts that a request would find."""
        return self._names.held()

    def may_be_shared(self, request: Request, index: int, block: KVCacheBlock) -> bool:
        """Whether a block from the first packed one on may be held by other requests, too."""
        planned = self._planned_of(request)
        if not planned.has_context:
            return False
        return self._names.is_named(request, planned.eviction, planned.cuts[0], index, block)

    def disown(self, request_id: str) -> None:
        """Lets nobody find what a request computes from now on: it may be wrong."""
        self._names.forget(request_id)

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Hashes full blocks, and names those of contexts that earlier steps have computed."""
        super().cache_blocks(request, *args, **kwargs)
        self._name_context(self._planned_of(request))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Names what a request leaves of its context, and forgets the request."""
        if planned := self._planned.get(request_id):
            self._name_context(planned)
        self._names.forget(request_id)
        return super().pop_blocks_for_free(request_id)

    def _name_context(self, planned: Planned) -> None:
        request, blocks = planned.request, self.req_to_blocks.get(planned.request.request_id)
        if blocks and planned.has_context:
            self._names.give(request, planned.eviction, planned.cuts[0], blocks)

    def is_pooled(self, request: Request) -> bool:
        """Whether entries are dropped of the request and its layers share the packed pages."""
        planned = self._planned_of(request)
        return bool(planned.cuts) and METHODS[planned.eviction.method].pooled

    def admit(self, request: Request) -> int:
        """Plans a request before its blocks are allocated, for the first time or again.

        Blocks that a cut packs are overwritten, so they must be private, and the observation
        window's queries must be computed: neither may come from the prefix cache. A method that
        needs the queries of the whole prompt takes nothing from it.

        Args:
            request: The request about to be scheduled.

        Returns:
            Tokens that may come from the prefix cache at most: a multiple of the block size, or all
            tokens without a cut.
        """
        planned = self._planned_of(request)
        if not planned.cuts:
            return request.num_tokens
        if METHODS[planned.eviction.method].whole_prompt:
            return 0
        return planned.cuts.first_private * self.block_size

    def num_usable(self, request: Request, num_found: int) -> int:
        """How many of the tokens that the prefix cache has are of use: no half of a segment.

        Args:
            request: The request about to be scheduled.
            num_found: Tokens found.
        """
        segments = self.segments_of(request)
        return segments.last_border(num_found) if segments else num_found

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Frees the blocks before the packed ones, once the tokens up to a cut are processed.

        Their hashes stay, so they serve other requests from the prefix cache until they are reused.
        Those of a context are the first to be: what is compressed takes its place, and would have
        to give way to them else.
        """
        planned = self._planned.get(request_id)
        if planned is None:
            return
        num_freed = planned.cuts.num_freed(processed_computed_tokens)
        blocks = self.req_to_blocks.get(request_id, ())
        # In all steps after the first one there is nothing left to free.
        if not num_freed or not blocks or blocks[num_freed - 1].is_null:
            return
        freed = [block for block in blocks[:num_freed] if not block.is_null]
        self._remove_blocks_in_range(request_id, 0, num_freed)
        if planned.has_context:
            self._reuse_first(freed)

    def _reuse_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Puts blocks that nobody holds in front of all that are free, the last one first."""
        queue = self.block_pool.free_block_queue
        free = [block for block in reversed(blocks) if block.ref_cnt == 0]
        for block in free:
            queue.remove(block)
        queue.prepend_n(free)

    def _num_hashable(self, request_cuts: Cuts) -> int:
        """None from the first private block on.

        Those will be overwritten, or hold tokens generated from a context with dropped entries.
        """
        return request_cuts.first_private * self.block_size


class WindowManager(PlannedManager, SlidingWindowManager):
    """vLLM's manager of sliding-window layers, beside layers that drop entries.

    These layers drop nothing, but what they compute of generated tokens depends on what the others
    dropped. Without its own hashes it could be found by a request that dropped nothing.
    """

    def _num_hashable(self, request_cuts: Cuts) -> int:
        """Those that are computed before anything is dropped."""
        return request_cuts.first_position


def shares_contexts(kv: KVCacheManager, request: Request) -> bool:
    """Whether a request may read what others compressed, and they what it does.

    Sliding windows beside full attention have blocks of their own, which are not kept for it.

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
