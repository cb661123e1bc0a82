"""How much memory a choice takes at once, on tensors without memory: nothing is computed."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_kvselect.choice import Sizes, choose, score
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cuda
from vllm_kvselect.scoring import r_kv
from vllm_kvselect.scoring.blocks import block_elements
from vllm_kvselect.scoring.held import Held, Paged
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.scoring.value_norms import OutputProjection


class Peak(TorchDispatchMode):
    """Counts the bytes of what lives at once.

    Attributes:
        num_bytes: At this moment.
        most: At most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for part in tree_leaves(made):
            if isinstance(part, torch.Tensor):
                self._count(part.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.num_bytes += size
        self.most = max(self.most, self.num_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.num_bytes -= size


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is collected before, and not within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Tensors without memory, launches that do nothing, and blocks as large as on a device."""
    from triton.runtime.interpreter import GridExecutor

    on_device = block_elements(torch.device("cuda"))
    # What an earlier engine left asks tensors for their numbers when it is collected.
    with (
        uncollected(),
        mock.patch.object(GridExecutor, "__call__", return_value=None),
        mock.patch.object(r_kv, "block_elements", return_value=on_device),
        FakeTensorMode(),
    ):
        yield


class FakeLayer:
    """A layer whose entries are read out of the cache."""

    def __init__(self, constants: ScoringInputs, num_columns: int) -> None:
        self._constants, self._num_columns = constants, num_columns

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        return replace(self._constants, query=query, key=key, value=value)

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self._constants.value
        read = memory.index_select(0, pages.flatten()).view(len(pages), -1, memory.shape[-1])
        key, value = read.chunk(2, dim=-1)
        return key, value


def choice_bytes(
    method: str,
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    hidden_size: int,
    num_layers: int,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that the choice of a prompt takes beside the cache, and what is moved of it."""
    config = EvictionConfig(method=method)
    block_size, behind = 16, 48
    num_competing, num_packed = num_tokens - behind, num_tokens // block_size // 8
    with nothing_computed():
        weight = torch.empty(num_kv_heads, head_size, group, hidden_size, dtype=dtype)
        square = torch.empty(num_kv_heads, head_size, head_size)
        memory = torch.empty(4, block_size, 2 * head_size, dtype=dtype)
        constants = ScoringInputs(
            memory,
            memory,
            memory,
            1.0,
            OutputProjection(weight, square.to(dtype)),
            rotation=Rotation(*torch.empty(2, num_tokens, head_size // 2)),
            probe=torch.empty(num_kv_heads, 2 * head_size + 1).T,
        )
        paged = Paged.of([constants] * num_layers, memory)
        layers = [FakeLayer(constants, num_tokens)] * num_layers
        pages = torch.empty(num_layers, num_kv_heads, num_tokens // block_size, dtype=torch.int64)
        absent = torch.empty(num_layers, num_kv_heads, dtype=torch.int64)
        sizes = num_layers, config.window, num_kv_heads * group, head_size
        with Peak() as peak:
            query = torch.empty(1, *sizes, dtype=dtype)
            given = num_competing, block_size, [0], [behind], True, query, None, [0], [0]
            held = Held(layers, pages, absent, *given, lambda: paged)
            candidates = score(held, config, cuda.KERNELS)
            retention = choose(
                held, candidates, Sizes([num_packed], block_size), config, cuda.KERNELS
            )
            cache = torch.empty(2, num_kv_heads, block_size, 2 * head_size, dtype=dtype)
            blocks = torch.empty(num_packed * num_layers, dtype=torch.int64)
            moved = pages.flatten(0, 1), retention.retained, num_competing, blocks
            cuda.KERNELS.move_retained(cache, *moved)
        return peak.most
