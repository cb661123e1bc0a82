"""The scheduler's side of the retention plan, in vLLM's block vocabulary."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.methods import METHODS
from vllm_kvselect.request import planned_config
from vllm_kvselect.retention import RetentionPlan, plan

if TYPE_CHECKING:
    from vllm_kvselect.engine.spec import HeadwiseSpec, WindowSpec


class PlannedManager(SingleTypeKVCacheManager):
    """What the managers of all groups share: plans of requests, and what may be hashed of them.

    A request whose prompt drops nothing has no plan and is treated as vLLM treats it. Every request
    is planned with its own settings.

    Args:
        kv_cache_spec: The group's spec, with the eviction configuration.
        **kwargs: vLLM's own arguments.
    """

    def __init__(self, kv_cache_spec: "HeadwiseSpec | WindowSpec", **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.eviction = kv_cache_spec.eviction
        # While the scheduler schedules: what was hashed of each request before, in blocks.
        self._num_hashed_before: dict[str, int] | None = None

    def plan(self, request: Request) -> RetentionPlan | None:
        """The plan of a request's prompt, the same that the workers compute.

        The prompt's length counts: a preempted request resumes with more tokens than its prompt,
        but its plan is still the same.
        """
        eviction = self._eviction_of(request)
        return plan(request.num_prompt_tokens, self.block_size, eviction)

    def _eviction_of(self, request: Request) -> EvictionConfig:
        """The request's own configuration."""
        params = request.sampling_params
        return planned_config(self.eviction, params.extra_args if params else None)

    def _num_hashable(self, request: Request, retention_plan: RetentionPlan) -> int:
        """Tokens of a planned request whose blocks may be hashed."""
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
        before its end. With a plan it resumes at the first packed block instead.
        """
        if self._num_hashed_before is not None:
            num_hashed = self.num_cached_block.get(request.request_id, 0)
            self._num_hashed_before.setdefault(request.request_id, num_hashed)
        retention_plan = self.plan(request)
        if retention_plan is not None:
            num_tokens = min(num_tokens, self._num_hashable(request, retention_plan))
            first_packed = retention_plan.first_packed * self.block_size
            replay_boundaries = (*replay_boundaries, first_packed)
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
        """Forgets hashes of what will not be computed, when a request ends or is preempted.

        vLLM hashes blocks when it schedules them. Under `--scheduling-policy priority` it may then
        preempt their request in the same step, and leaves hashes that find whatever is in there.
        """
        blocks = super().pop_blocks_for_free(request_id)
        num_computed = (self._num_hashed_before or {}).pop(request_id, None)
        if num_computed is not None:
            self.block_pool.evict_blocks({block.block_id for block in blocks[num_computed:]})
        return blocks


class HeadwiseManager(PlannedManager, FullAttentionManager):
    """Frees the blocks before the packed ones and keeps the packed ones private."""

    def __init__(self, kv_cache_spec: "HeadwiseSpec", **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._plans: dict[str, RetentionPlan] = {}

    def is_pooled(self, request: Request) -> bool:
        """Whether entries are dropped of the prompt and its layers share the packed pages."""
        return self.plan(request) is not None and METHODS[self._eviction_of(request).method].pooled

    def admit(self, request: Request) -> int:
        """Plans a request before its blocks are allocated, for the first time or again.

        Packed blocks are overwritten, so they must be private, and the observation window's
        queries must be computed: neither may come from the prefix cache. A method that needs the
        queries of the whole prompt takes nothing from it.

        Args:
            request: The request about to be scheduled.

        Returns:
            Tokens that may come from the prefix cache at most: a multiple of the block size, or all
            tokens without a plan.
        """
        retention_plan = self.plan(request)
        if retention_plan is None:
            return request.num_tokens
        self._plans[request.request_id] = retention_plan
        if METHODS[self._eviction_of(request).method].whole_prompt:
            return 0
        return retention_plan.first_packed * self.block_size

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Frees the blocks before the packed ones, once the whole prompt has been processed.

        Their hashes stay, so they serve other requests from the prefix cache until they are reused.
        """
        if num_prompt_tokens is None or processed_computed_tokens < num_prompt_tokens:
            return
        retention_plan = self._plans.get(request_id)
        if retention_plan is not None:
            self._remove_blocks_in_range(request_id, 0, retention_plan.first_packed)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets a request that ends or is preempted."""
        self._plans.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _num_hashable(self, request: Request, retention_plan: RetentionPlan) -> int:
        """None from the first packed block on.

        Those will be overwritten, or hold tokens generated from a context with dropped entries.
        """
        return retention_plan.first_packed * self.block_size


class WindowManager(PlannedManager, SlidingWindowManager):
    """vLLM's manager of sliding-window layers, beside layers that drop entries.

    These layers drop nothing, but what they compute of generated tokens depends on what the others
    dropped. Without its own hashes it could be found by a request that dropped nothing.
    """

    def _num_hashable(self, request: Request, retention_plan: RetentionPlan) -> int:
        """Those of the prompt, which is computed before anything is dropped."""
        return request.num_prompt_tokens


def headwise_manager(kv: KVCacheManager) -> HeadwiseManager:
    """The one manager of layers that drop entries (`checks.refuse_mixed_groups`)."""
    (manager,) = (m for m in kv.coordinator.single_type_managers if isinstance(m, HeadwiseManager))
    return manager
