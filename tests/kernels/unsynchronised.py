"""A guard that fails when torch would wait for the device, or give a shape that depends on data."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

_OPERATORS = {
    aten._local_scalar_dense,  # item, int, float, bool
    aten.bincount,
    aten.equal,
    aten.histc,
    aten.is_nonzero,
    aten.item,
    aten.lift_fresh,  # a tensor from Python's numbers: a copy to the device, which waits
    aten.masked_select,
    aten.multinomial,
    aten.nonzero,
    aten.repeat_interleave,
    aten.unique_consecutive,
    aten.unique_dim,
    aten._unique2,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}

_METHODS = {"__array__", "cpu", "numpy", "tolist"}
"""On CPU tensors these run no operator."""


class SynchronisationError(AssertionError):
    """Torch would have waited for the device."""


class _Operators(TorchDispatchMode):
    """Looks at every operator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operator = func.overloadpacket
        by_mask = operator in _INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if operator in _OPERATORS or by_mask:
            raise SynchronisationError(str(func))
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Looks at every call.

    Args:
        on_host: Tensors that are on the host anyway.
    """

    def __init__(self, on_host: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._on_host = {tensor.untyped_storage().data_ptr() for tensor in on_host}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _METHODS:
            with torch._C.DisableTorchFunction():
                storage = args[0].untyped_storage().data_ptr()
            if storage not in self._on_host:
                raise SynchronisationError(func.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def unsynchronised(*on_host: torch.Tensor) -> Iterator[None]:
    """Fails on a synchronisation; on a GPU by torch's own guard, else by looking for the calls.

    Args:
        *on_host: Tensors that are on the host anyway and may be read.
    """
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_unguarded(self: Any, *args: Any, **kwargs: Any) -> None:
        # The interpreter computes on the host: what it reads there is no synchronisation.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            launch(self, *args, **kwargs)

    from_numpy = torch.from_numpy

    def from_numpy_unguarded(array: np.ndarray) -> torch.Tensor:
        with _disable_current_modes():  # it stays on the host
            return from_numpy(array)

    with (
        mock.patch.object(GridExecutor, "__call__", launch_unguarded),
        mock.patch.object(torch, "from_numpy", from_numpy_unguarded),
        _Operators(),
        _Methods(on_host),
    ):
        yield


SYNCHRONISING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.max()),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "one-sided where": lambda x: torch.where(x > 0),
    "reading by a mask": lambda x: x[x > 0],
    "writing by a mask": lambda x: x.index_put((x > 0,), x.sum()),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x.clone()),  # of itself nothing is read
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "a tensor from numbers": lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
}
"""What the guard must find."""
