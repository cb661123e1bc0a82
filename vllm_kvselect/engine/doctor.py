"""What an installation can do: what a start needs is tried, and what fails is a finding too.

So imports stand inside the functions here: vLLM may be missing, or may have lost a name.
"""

import os
import platform as host
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points, version
from pkgutil import walk_packages

from vllm_kvselect import __version__
from vllm_kvselect.config import CONFIG_KEY, ConfigError

_PLUGIN = "kvselect"
"""Name of our entry point, which vLLM's variable VLLM_PLUGINS may leave out."""
_OTHER_WING = {"cpu": "cuda", "cuda": "cpu"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; if it `stops`, nothing can be served because of it."""

    subject: str
    text: str
    stops: bool = False


def examine(model: str | None = None) -> Iterator[Finding]:
    """Examines this installation, and a model, by folder or hub name, as a server would check it.

    Findings come in the order in which people ask; the last one stops where no other can be made.
    """
    checks: dict[str, Callable[[], str]] = {
        "vllm-kvselect": _versions,
        "vLLM": _release,
        "platform": _platform,
        "data type": _data_type,
        "kernels": _kernels,
        "plugin": _plugin,
        "hooks": _hooks,
        "names": _names,
        "model runner": _model_runner,
    }
    if model is not None:
        checks["model"] = partial(_model, model)
    for subject, check in checks.items():
        finding = _finding(subject, check)
        yield finding
        if finding.stops and subject in ("vLLM", "platform"):
            return


def _finding(subject: str, check: Callable[[], str]) -> Finding:
    """Makes a check; what it raises stops, whatever it is."""
    try:
        return Finding(subject, check())
    except ConfigError as error:
        return Finding(subject, " ".join(str(error).split()), stops=True)
    except Exception as error:  # of vLLM's code, which may raise anything
        return Finding(subject, f"{type(error).__name__}: {_last_line(error)}", stops=True)


def _last_line(error: Exception) -> str:
    """What an error says at its end, pydantic's pointers aside."""
    lines = [line for line in str(error).strip().splitlines() if "errors.pydantic.dev" not in line]
    return lines[-1].split(" [type=")[0].strip() if lines else "no message"


def _versions() -> str:
    return f"{__version__}, Python {host.python_version()}, torch {version('torch')}"


def _release() -> str:
    import vllm
    from packaging.version import Version

    from vllm_kvselect.engine.sources import RELEASES

    release = vllm.__version__
    if Version(release).base_version in RELEASES:
        return f"{release}, known"
    return f"{release}, unknown to this release of vllm-kvselect; known: {', '.join(RELEASES)}"


def _platform() -> str:
    from vllm.platforms import current_platform

    from vllm_kvselect.engine.platforms import platform_name, unknown_platform
    from vllm_kvselect.machine import processor

    if problem := unknown_platform():
        raise ConfigError(problem)
    if platform_name() == "cpu":
        return f"cpu: {processor()}, {os.cpu_count()} processors"
    capability = current_platform.get_device_capability()
    name, number = current_platform.get_device_name(), current_platform.device_count()
    return f"cuda: {name} (x {number}), compute capability {capability.as_version_str()}"


def _data_type() -> str:
    from vllm_kvselect.engine.platforms import has_fp8_caches, platform_name
    from vllm_kvselect.machine import dtype_name, fast_dtype

    if platform_name() == "cuda":
        from vllm.platforms import current_platform

        return f"{dtype_name(current_platform.supported_dtypes[0])} is fast"
    fast = dtype_name(fast_dtype())
    caches = f"; {'' if has_fp8_caches() else 'no '}fp8 KV caches"
    if fast == "bfloat16":
        return f"bfloat16 is fast{caches}"
    return f"{fast} is fast, others are not; add --dtype {fast}{caches}"


def _kernels() -> str:
    from vllm_kvselect.engine.platforms import platform_name

    if platform_name() == "cuda":
        from vllm_kvselect.kernels import cuda as cuda

        return f"Triton {version('triton')}, compiled when they are first launched"
    import torch

    from vllm_kvselect.kernels import cpu, tiers
    from vllm_kvselect.kernels.build import KernelError

    try:
        cpu.load()
    except KernelError as error:
        return f"plain PyTorch, several times slower: {error}"
    tier_of = [tiers.describe(dtype) for dtype in (torch.bfloat16, torch.float32)]
    return f"compiled; {'; '.join(tier_of)}"


def _plugin() -> str:
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_general_plugins

    if not entry_points(group=DEFAULT_PLUGINS_GROUP, name=_PLUGIN):
        python = sys.executable
        raise ConfigError(f"not installed for {python}; install it with this Python's pip")
    if envs.VLLM_PLUGINS is not None and _PLUGIN not in envs.VLLM_PLUGINS:
        named = ",".join(envs.VLLM_PLUGINS)
        raise ConfigError(f"left out by VLLM_PLUGINS = {named!r}; unset it, or add {_PLUGIN}")
    load_general_plugins()
    # vLLM logs the error of a plugin that it cannot load, and goes on.
    import_module("vllm_kvselect.engine.hooks")
    if not getattr(EngineArgs.create_engine_config, "is_kvselect_hook", False):
        raise ConfigError("vLLM has not loaded it; VLLM_LOGGING_LEVEL=DEBUG shows why")
    return "loaded by vLLM"


def _hooks() -> str:
    from vllm_kvselect.engine import hooks
    from vllm_kvselect.engine.sources import KNOWN_SOURCES, unknown_vllm

    if unknown := hooks.unknown_sources():
        raise ConfigError(unknown_vllm(unknown))
    return f"all {len(KNOWN_SOURCES)} functions that are hooked are as this release knows them"


def _names() -> str:
    """Imports whatever a server may import on this platform."""
    from vllm_kvselect import engine
    from vllm_kvselect.engine.platforms import platform_name

    beside = f"{engine.__name__}.{_OTHER_WING[platform_name()]}."
    found = [module.name for module in walk_packages(engine.__path__, f"{engine.__name__}.")]
    modules = [name for name in found if not f"{name}.".startswith(beside)]
    for name in modules:
        import_module(name)
    return f"all names of vLLM that {len(modules)} modules import are there"


def _model_runner() -> str:
    from vllm.config import VllmConfig

    from vllm_kvselect.engine.frontend.checks import platform_problems

    vllm_config = VllmConfig()
    if problems := platform_problems(vllm_config):
        raise ConfigError("; ".join(problems))
    return "V2, where the model allows it" if vllm_config.use_v2_model_runner else "V1"


def _model(name: str) -> str:
    """Makes the configuration of a server; what is not its own to refuse, vLLM refuses."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvselect.engine.models import layer_types
    from vllm_kvselect.engine.start_up import why_slow

    settings = {"skip_tokenizer_init": True, "additional_config": {CONFIG_KEY: {}}}
    vllm_config = EngineArgs(model=name, **settings).create_engine_config()
    types = layer_types(vllm_config)
    served = (
        f"{name} can be served: {vllm_config.model_config.architecture}, "
        f"{types.count('full_attention')} of {len(types)} layers drop entries"
    )
    return "; ".join(filter(None, (served, why_slow(vllm_config))))
