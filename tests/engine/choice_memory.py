"""How much memory a choice takes at once, on tensors without memory: nothing is computed."""

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

from vllm_kvselect.choice import retain_layer, retain_pool, score_layer
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cuda
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring import h2o, r_kv
from vllm_kvselect.scoring.blocks import block_elements
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.memory import ObservingMemory
from vllm_kvselect.scoring.parts import memory_named
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting.ranking import Candidates


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
def nothing_computed() -> Iterator[None]:
    """Tensors without memory, launches that do nothing, and blocks as large as on a device."""
    from triton.runtime.interpreter import GridExecutor

    on_device = block_elements(torch.device("cuda"))
    with (
        mock.patch.object(GridExecutor, "__call__", return_value=None),
        mock.patch.object(h2o, "block_elements", return_value=on_device),
        mock.patch.object(r_kv, "block_elements", return_value=on_device),
        FakeTensorMode(),
    ):
        yield


def choice_bytes(
    method: str,
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    hidden_size: int,
    num_layers: int,
    chunk: int,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that the choice of a prompt takes, with its keys and values out of the cache."""
    config = EvictionConfig(method=method)
    of_method, block_size = METHODS[method], 16
    whole_prompt = of_method.whole_prompt
    with nothing_computed():
        weight = torch.empty(num_kv_heads, head_size, group, hidden_size, dtype=dtype)
        square = torch.empty(num_kv_heads, head_size, head_size)
        projection = OutputProjection(weight, square.to(dtype), square)
        probe = torch.empty(2 * head_size + 1, num_kv_heads)
        rotation = Rotation(*torch.empty(2, num_tokens, head_size // 2))
        stacks: list[torch.Tensor] = []
        with Peak() as peak:
            read = torch.empty(num_kv_heads, num_tokens, 2 * head_size, dtype=dtype)
            key, value = read.split(head_size, dim=-1)
            num_queries = chunk if whole_prompt else config.window
            query = torch.empty(num_queries, num_kv_heads * group, head_size, dtype=dtype)
            num_bytes_of_query = query.nbytes if whole_prompt else 0  # the model's
            inputs = ScoringInputs(
                query, key, value[:, :-48], 1.0, projection, rotation=rotation, probe=probe
            )
            sizes = (num_tokens // block_size // 8, block_size)
            if (remembered := of_method.scorer.memory) is not None:
                memory = memory_named(remembered.by)(num_tokens, num_layers, config)
                if isinstance(memory, ObservingMemory):
                    memory.observe(replace(inputs, value=value), 0, cuda.KERNELS.twin)
                inputs = memory.complete(inputs, cuda.KERNELS.twin)
            candidates = score_layer(inputs, config, cuda.KERNELS)
            if of_method.pooled:
                kept = Candidates.empty(num_layers, candidates)
                stacks += [part for part in kept if part is not None]
                retain_pool(kept, *sizes, config, cuda.KERNELS)
            else:
                values = inputs.value, projection
                retain_layer(candidates, *values, *sizes, config, cuda.KERNELS)
        return peak.most - num_bytes_of_query
