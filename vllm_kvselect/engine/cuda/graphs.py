"""The place where vLLM chooses graphs, which has no public extension point (patches/0005)."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.sources import KNOWN_GRAPH_SOURCES, source_digest, unknown_vllm


def unknown_sources() -> list[str]:
    """Names of the functions whose source is not what the hook was written for."""
    # Here, because a worker needs only the one of its model runner.
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    functions = (CudagraphDispatcher.dispatch, CudaGraphManager.dispatch)
    return [function.__qualname__ for function in functions if not _is_known(function)]


def hook_full_graphs(model_runner: Any, is_vetoed: Callable[[], bool]) -> None:
    """Keeps steps of one worker out of graphs that hold a whole step (patches/0005).

    A batch of one token a row may run as such a graph, also where that token completes a prompt;
    vLLM chooses the graph before it builds the metadata.

    Args:
        model_runner: vLLM's, of either version, with its KV cache.
        is_vetoed: Whether the step that is about to run must be seen in Python.

    Raises:
        ConfigError: If this vLLM chooses graphs in a way that is not known.
    """
    manager = getattr(model_runner, "cudagraph_manager", None)
    owner = model_runner.cudagraph_dispatcher if manager is None else manager
    dispatch = owner.dispatch
    if not _is_known(dispatch):
        raise ConfigError(unknown_vllm([dispatch.__qualname__]))
    signature = inspect.signature(dispatch)

    @functools.wraps(dispatch)
    def dispatch_hook(*args: Any, **kwargs: Any) -> Any:
        if not is_vetoed():
            return dispatch(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if "uniform_token_count" in given:
            # No graph of a whole step takes a batch that is not uniform.
            return dispatch(**{**given, "uniform_token_count": None, "max_query_len": None})
        invalid = {*(given.get("invalid_modes") or ()), CUDAGraphMode.FULL}
        return dispatch(**{**given, "invalid_modes": invalid})

    owner.dispatch = dispatch_hook


def _is_known(dispatch: Callable[..., Any]) -> bool:
    return source_digest(dispatch) in KNOWN_GRAPH_SOURCES.get(dispatch.__qualname__, {}).values()
