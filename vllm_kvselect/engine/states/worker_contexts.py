"""Contexts between cache and folder: pages and offsets are copied here."""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.drop.state import Made, RetentionState
from vllm_kvselect.engine.notice import StepNotice
from vllm_kvselect.engine.states.worker_files import Shape, Transfers
from vllm_kvselect.engine.view.memory import all_layers
from vllm_kvselect.store.file import Stored
from vllm_kvselect.store.folder import Folder


class StoredContexts:
    """What a worker has in a folder, and how it gets there and back.

    Args:
        memory: The caches of all layers as one, `[num_layers * num_blocks, num_kv_heads, page_size,
            ...]`.
        state: Page offsets of what is in it.
        transfers: The files.
    """

    def __init__(self, memory: torch.Tensor, state: RetentionState, transfers: Transfers) -> None:
        self._memory, self._state, self._page_size = memory, state, memory.shape[2]
        self._transfers = transfers
        self._loads: dict[int, bool] = {}

    @classmethod
    def of(
        cls,
        kv_cache: torch.Tensor,
        state: RetentionState,
        eviction: EvictionConfig,
        vllm_config: VllmConfig,
    ) -> Self:
        """Connects the layers of a group to the folder."""
        assert eviction.context_store is not None
        memory = all_layers(kv_cache)
        shape = Shape(state.num_layers, tuple(memory.shape[1:]), memory.dtype)
        folder = Folder(Path(eviction.context_store), eviction.context_store_bytes)
        folder.make()  # on this node
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        ranks = get_tensor_model_parallel_rank(), num_ranks
        model = Path(vllm_config.model_config.model).name  # for people who list the folder
        transfers = Transfers(folder, *ranks, model, shape, least_of_all_ranks)
        return cls(memory, state, transfers)

    def save(self, made: Iterable[Made]) -> None:
        """Stores the contexts that were compressed in this step; their requests still hold them."""
        for request, cut, *_ in made:
            name, plan = request.stored_as, request.plan
            if name is None or not plan.has_context or cut is not plan.context_cut:
                continue
            request.stored_as = None
            if not self._transfers.may_save():
                continue
            end = cut.position // self._page_size
            given_back, fresh = request.progress.swap
            block_ids = fresh + given_back[cut.first_of_tail * cut.per_block : end]
            places = self._places(block_ids)
            pages = self._bytes.index_select(0, places).cpu().view(self._memory.dtype)
            pages = pages.view(self._state.num_layers, len(block_ids), *self._memory.shape[1:])
            offsets = self._state.offsets[block_ids[0]].cpu().clone()
            self._transfers.save(name, pages, offsets, cut.position, plan.settings.method)

    def load(self, scheduled: SchedulerOutput) -> None:
        """Follows what the scheduler says of loads, and puts what has arrived into the cache."""
        notice = StepNotice.of(scheduled)
        self._transfers.drop(notice.dropped)
        self._transfers.begin(notice.loads)
        is_idle = not scheduled.total_num_scheduled_tokens
        for number, block_ids, stored in self._transfers.arrived(is_idle):
            if stored is not None:
                self._put(block_ids, stored)
            self._loads[number] = stored is not None

    def take_news(self) -> tuple[dict[int, bool], int, int]:
        """What the scheduler and people are to know since the last time.

        Whether loads are in their blocks; how many contexts were stored, and how many could not be.
        """
        loads, self._loads = self._loads, {}
        return loads, *self._transfers.take_counts()

    def close(self) -> None:
        """Waits for what is being written."""
        self._transfers.close()

    @property
    def _bytes(self) -> torch.Tensor:
        """The memory as bytes: some types of a cache can be copied, but not picked from."""
        return self._memory.view(torch.uint8)

    def _places(self, block_ids: list[int]) -> torch.Tensor:
        """Places of blocks in the memory of all layers, layer by layer."""
        num_layers, device = self._state.num_layers, self._memory.device
        num_blocks = len(self._memory) // num_layers
        of_layers = torch.arange(num_layers, device=device)[:, None] * num_blocks
        return (of_layers + torch.tensor(block_ids, device=device)).flatten()

    def _put(self, block_ids: list[int], stored: Stored) -> None:
        device = self._memory.device
        pages = stored.pages.flatten(0, 1).view(torch.uint8).to(device)
        self._bytes.index_copy_(0, self._places(block_ids), pages)
        key = torch.tensor(block_ids[:1], device=device)
        self._state.store(key, stored.offsets[None].to(device))


def least_of_all_ranks(numbers: list[int]) -> list[int]:
    """Of each number that the ranks of tensor parallelism have, the least one of all."""
    group = get_tp_group()
    if group.world_size == 1:
        return numbers
    least = torch.tensor(numbers)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return least.tolist()
