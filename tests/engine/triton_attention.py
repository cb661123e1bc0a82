"""vLLM's own Triton kernels of attention, run by Triton's interpreter.

Without a device vLLM replaces Triton by a placeholder when it is imported. Its modules are loaded a
second time here, with Triton in place.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from vllm import triton_utils
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import triton_attn

from tests.kernels import interpreter
from vllm_kvselect.engine.cuda import triton_attention as ours

OPS = "vllm.v1.attention.ops."
MODULES = ("triton_attention_helpers", "triton_unified_attention", "triton_reshape_and_cache_flash")


class H100:
    """What vLLM's modules ask the platform for."""

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self) -> DeviceCapability:
        return DeviceCapability(9, 0)

    def has_device_capability(self, least: int) -> bool:
        return least <= 90

    def is_device_capability(self, asked: tuple[int, int]) -> bool:
        return asked == (9, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)


@contextmanager
def _triton_in_place() -> Iterator[None]:
    import triton

    names = [OPS + module for module in MODULES]
    with pytest.MonkeyPatch.context() as patch:
        real = ModuleType(triton_utils.__name__)
        vars(real).update(vars(triton_utils) | {"triton": triton, "tl": triton.language})
        patch.setitem(sys.modules, real.__name__, real)
        for name in names:
            # Put into place first, so that what stood there, or nothing, comes back in the end.
            patch.setitem(sys.modules, name, real)
            del sys.modules[name]
        yield


@cache
def _kernels() -> tuple[Any, Any]:
    with _triton_in_place():
        unified, reshape = (importlib.import_module(OPS + module) for module in MODULES[1:])
    reshape.current_platform = H100()
    return unified.unified_attention, reshape.triton_reshape_and_cache_flash


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts the kernels where vLLM's backend looks for them."""
    unified_attention, reshape_and_cache = _kernels()

    def attention(**given: Any) -> None:
        # Lanes that pad a tile, and rows that pad a batch, divide zero by zero: nobody reads them.
        with np.errstate(all="ignore"), interpreter.unchecked():
            unified_attention(**given)

    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # chooses its tiles
    patch.setattr(triton_attn, "current_platform", H100())
    for module in (triton_attn, ours):  # each has several tiles of a sequence of some 100 tokens
        patch.setattr(module, "NUM_PAR_SOFTMAX_SEGMENTS", 4)
    patch.setattr(triton_attn, "unified_attention", attention)
    patch.setattr(triton_attn, "triton_reshape_and_cache_flash", reshape_and_cache)
