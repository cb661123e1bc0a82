"""Counts launches without a card: what a device would be asked to do.

A launch is an operator of PyTorch that reaches a device and is neither a view nor an allocation, or
a kernel of Triton. Tensors need no numbers for that: they are of the device `meta`, or of a fake
one, and Triton's launches end at the launch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

aten = torch.ops.aten

_NOTHING = {
    aten._reshape_alias,
    aten._unsafe_view,
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    torch.ops.prim.device,
}
"""Allocations, views that their schemas do not tell, and questions that only fake tensors ask."""


class _Operators(TorchDispatchMode):
    """Takes down the operators that reach a device.

    Args:
        launches: Where their names go.
        device: Its type.
    """

    def __init__(self, launches: list[str], device: str) -> None:
        super().__init__()
        self._launches, self._device = launches, device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)]
        reaches = any(tensor.device.type == self._device for tensor in tensors)
        if reaches and not func.is_view and func.overloadpacket not in _NOTHING:
            self._launches.append(str(func))
        return found


@contextmanager
def recorded(device: str = "meta") -> Iterator[list[str]]:
    """Takes down what is launched while open; nothing is computed.

    Args:
        device: Type of the device that tensors are of.

    Yields:
        Names of operators and kernels, in order.
    """
    launches: list[str] = []

    def interpreted(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launches.append(self.fn.__name__)

    def compiled(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        launches.append(self.__name__)

    with (
        mock.patch.object(GridExecutor, "__call__", interpreted),
        mock.patch.object(JITFunction, "run", compiled),
        _Operators(launches, device),
    ):
        yield launches
