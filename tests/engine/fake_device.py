"""Serves random requests on a device that does not exist, with every method.

Run as a module in a process of its own, where PyTorch gets a device named `card`. Its tensors have
shapes and no memory: an operator that mixes devices raises, and so does whatever would read a
number back, or give a shape that depends on one. Launches of Triton end at the launch. Prints, as
JSON, how many steps were made for each run, and what was raised where that is not how it should be.
"""

import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import GridExecutor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn, triton_attn

from tests.engine import flash_attention, triton_attention
from tests.engine.cuda_layers import Layers, vllm_config
from tests.engine.cuda_requests import (
    BLOCK_SIZE,
    GROUP,
    HEAD_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_KV_HEADS,
    Request,
)
from tests.engine.cuda_traffic import Wish, serve
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cuda import any_order
from vllm_kvselect.engine.cuda.flash_attention import HeadwiseFlashAttentionBackend
from vllm_kvselect.engine.cuda.triton_attention import HeadwiseTritonAttentionBackend
from vllm_kvselect.engine.cuda.warm_up import warm_up
from vllm_kvselect.engine.drop.arriving import Arriving
from vllm_kvselect.engine.step import builder as step_builder
from vllm_kvselect.kernels import cuda
from vllm_kvselect.paging.order import Sharing
from vllm_kvselect.registry import METHODS

DEVICE = "card"
BACKENDS = (HeadwiseFlashAttentionBackend, HeadwiseTritonAttentionBackend)
SPARSE = {
    "prefill": "critiprefill",
    "prefill_segment": 32,
    "prefill_block": 16,
    "prefill_budget": 32,
    "prefill_dense_until": 32,
}
CANARIES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "mixed devices": lambda card, host: card + host,
    "an index on the host": lambda card, host: card.index_select(0, host.long()),
    "item": lambda card, _: card.sum().item(),
    "bool": lambda card, _: bool((card > 0).any()),
    "tolist": lambda card, _: card.tolist(),
    "nonzero": lambda card, _: card.nonzero(),
    "reading by a mask": lambda card, _: card[card > 0],
    "numpy": lambda card, _: card.cpu().numpy(),
}
"""What the device must find."""


class FakeLayers(Layers):
    """Layers whose tensors are on the device; what the host knows of a batch stays real."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, device=DEVICE, **kwargs)
        with _disable_current_modes():
            self.block_table = torch.zeros(MAX_NUM_SEQS, MAX_MODEL_LEN // BLOCK_SIZE).int()
            self.seq_lens = torch.zeros(MAX_NUM_SEQS, dtype=torch.int32)

    def common(
        self, rows: Sequence[tuple[Request, int]], num_rows: int | None = None
    ) -> CommonAttentionMetadata:
        device, self.device = self.device, torch.device("cpu")
        with _disable_current_modes():
            made = super().common(rows, num_rows)
        self.device = device
        names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        return replace(
            made, **{name: torch.empty_like(getattr(made, name), device=DEVICE) for name in names}
        )

    def _given(
        self, index: int, rows: Sequence[tuple[Request, int]], num_tokens: int
    ) -> Iterator[torch.Tensor]:
        for heads in (GROUP * NUM_KV_HEADS, NUM_KV_HEADS, NUM_KV_HEADS):
            shape = num_tokens, 2 * heads, HEAD_SIZE
            yield torch.empty(shape, dtype=self.dtype, device=self.device)[:, :heads]

    def _overwrite(self, blocks: Sequence[int]) -> None:
        """There is nothing to overwrite."""


class ToDevice(TorchFunctionMode):
    """Copies to the device give its tensors; PyTorch would look for a kernel that copies numbers.

    Args:
        mode: Whose tensors they become.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.numpy, torch.Tensor.to) and type(args[0]) is torch.Tensor:
            if func is torch.Tensor.numpy:  # of the host
                with _disable_current_modes():
                    return func(*args, **kwargs)
            if any(str(each).startswith(DEVICE) for each in (*args[1:], *kwargs.values())):
                args = (self._mode.from_tensor(args[0]), *args[1:])
        return func(*args, **kwargs)


@contextmanager
def device() -> Iterator[None]:
    """Tensors without memory, calls of attention and launches that do nothing."""
    from_numpy = torch.from_numpy

    def on_host(array: np.ndarray) -> torch.Tensor:
        with _disable_current_modes():
            return from_numpy(array)

    def schedule(**given: Any) -> torch.Tensor:
        return torch.zeros(1 + -(-given["batch_size"] // 4) * 4, dtype=torch.int32, device=DEVICE)

    with pytest.MonkeyPatch.context() as patch:
        flash_attention.install(patch)
        triton_attention.install(patch)
        patch.setattr(flash_attn, "flash_attn_varlen_func", lambda **_: None)
        patch.setattr(any_order, "attend", lambda *_: None)
        patch.setattr(any_order.Trial, "takes_any_order", lambda *_: True)
        patch.setattr(any_order.Trial, "sharing", lambda _, most: Sharing(128, 132, most, 3))
        patch.setattr(flash_attn, "reshape_and_cache_flash", lambda *_: None)
        patch.setattr(flash_attn, "get_scheduler_metadata", schedule)
        patch.setattr(triton_attn, "unified_attention", lambda **_: None)
        patch.setattr(triton_attn, "triton_reshape_and_cache_flash", lambda *_: None)
        # What arrives later is read later; where layers lie is asked of their addresses.
        patch.setattr(Arriving, "__int__", lambda _: 3)
        patch.setattr(step_builder, "refuse_scattered_layers", lambda _: None)
        patch.setattr(torch, "from_numpy", on_host)
        with (
            mock.patch.object(GridExecutor, "__call__", return_value=None),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            ToDevice(mode),
        ):
            yield


@cache
def config_of_all() -> VllmConfig:
    return vllm_config(graphs=True)


def serve_all(method: str, backend: Any, values: dict[str, Any]) -> int:
    """Warms up and serves a few requests with a method, chunked, preempted, padded; its steps."""
    eviction = EvictionConfig.parse({"method": method, "window": 8, "budget": 48, **values})
    config = config_of_all()
    with device():
        layers = FakeLayers(eviction, cuda.KERNELS, config, backend)
        warm_up(layers.builder, [method], eviction)
        draw = random.Random(0)
        num_new = 14 if eviction.decode_budget else 4  # one round
        wishes = [Wish(length, num_new, eviction) for length in (130, 20, 170)]
        num_steps = serve(layers, wishes, draw, most=3, chunks=(40, 64, 200))
        long = layers.served(100, 104, eviction)
        layers.run((long, 100))
        common = layers.common([(long, 1)], MAX_NUM_SEQS)  # a graph's padding
        layers.make_rounds([(long, 1)])
        layers.forward([(long, 1)], common, layers.builder.build(0, common))
    return num_steps


def runs() -> dict[str, tuple[str, Any, dict[str, Any]]]:
    """Every method, in rounds where it can, sparsely, and the other backend."""
    flash, triton = BACKENDS
    rounds = {"decode_budget": 40, "decode_interval": 10}
    found: dict[str, tuple[str, Any, dict[str, Any]]] = {
        name: (name, flash, rounds if method.in_rounds else {}) for name, method in METHODS.items()
    }
    found["sparse prefill"] = ("snapkv", flash, SPARSE)
    found["Triton's backend"] = ("adakv-perturb", triton, rounds)
    return found


def main() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    found: dict[str, object] = {}
    with device():
        tensors = torch.zeros(3, device=DEVICE), torch.zeros(3)
        for name, wrong in CANARIES.items():
            try:
                wrong(*tensors)
            except Exception as error:
                found[name] = type(error).__name__
            else:
                found[name] = 0
    for name, run in runs().items():
        try:
            found[name] = serve_all(*run)
        except Exception:
            found[name] = traceback.format_exc()[:4000]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
