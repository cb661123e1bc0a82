"""Where probes are kept, and which one a model uses."""

from pathlib import Path

from vllm_kvselect.cache_dir import default_cache_dir
from vllm_kvselect.config import ConfigError
from vllm_kvselect.probes.file import Probe

_SHIPPED = Path(__file__).parent / "shipped"


def default_path(name: str, fingerprint: str) -> Path:
    """Where `vllm-kvselect calibrate` writes a model's probe; the fingerprint finds it again."""
    return default_cache_dir() / "probes" / f"{name}-{_short(fingerprint)}.safetensors"


def find_probe(model: str, fingerprint: str, file: str | None) -> tuple[Probe, Path]:
    """Finds a model's probe: the file that is named, else the user's own, else the package's.

    Raises:
        ConfigError: If there is none, if it cannot be read, or if it is another model's.
    """
    path = Path(file) if file is not None else _kept(fingerprint)
    if path is None:
        raise ConfigError(
            f"there is no probe of {model}; make one with `vllm-kvselect calibrate "
            f"{model}`, or name its file (--kv-eviction-probe)"
        )
    probe = Probe.load(path, model)
    if probe.facts.model.fingerprint != fingerprint:
        raise ConfigError(
            f"{path} is the probe of {probe.facts.model.name}, whose weights are not those of "
            f"{model}; make another one with `vllm-kvselect calibrate {model}`"
        )
    return probe, path


def _kept(fingerprint: str) -> Path | None:
    """The model may have another name than when it was calibrated."""
    name = f"*-{_short(fingerprint)}.safetensors"
    for folder in (default_cache_dir() / "probes", _SHIPPED):
        for path in sorted(folder.glob(name)):
            return path
    return None


def _short(fingerprint: str) -> str:
    return fingerprint[:12]
