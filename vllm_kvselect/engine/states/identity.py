"""What files of contexts belong to: everything that is the same for all its requests.

A file is found by its name alone. So the name depends on all that decides what the pages hold and
how they are read: weights, the model's configuration, data types, the cache's layout.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.config import VllmConfig

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.probes.fingerprint import fingerprint, full_fingerprint
from vllm_kvselect.probes.places import find_probe
from vllm_kvselect.scorers import ProbeFile
from vllm_kvselect.store.file import VERSION

_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
"""Of a model's configuration: where it lies and what wrote it."""


@dataclass(frozen=True)
class StoreIdentity:
    """What the names of a server's files have in common.

    A digest of all of it, and how many ranks have a file each.
    """

    digest: str
    num_ranks: int


def store_identity(
    vllm_config: VllmConfig, eviction: EvictionConfig, layout: str, reads_probe: bool
) -> StoreIdentity:
    """Asks for everything once the model is loaded; the same on all ranks.

    `layout` is how the attention kernel lays out a page; `reads_probe`, whether some method reads
    the model's probe.

    Raises:
        ConfigError: If the weights cannot be told from others.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    where = model.model, model.revision, vllm_config.load_config.download_dir
    try:
        weights = full_fingerprint(*where)
    except ConfigError as error:
        raise ConfigError(f"contexts cannot be stored: {error}") from None
    config = {
        key: value
        for key, value in model.hf_config.to_dict().items()
        if key not in _NOT_OF_THE_MODEL
    }
    facts: dict[str, Any] = {
        "file": VERSION,
        "vllm": vllm.__version__,
        "weights": weights,
        "config": config,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "cache_dtype": vllm_config.cache_config.cache_dtype,
        # One kind of positions depends on it.
        "max_model_len": model.max_model_len if "longrope" in str(config) else 0,
        "block_size": vllm_config.cache_config.block_size,
        "num_ranks": parallel.tensor_parallel_size,
        "layout": layout,
        "probe": "",
    }
    if reads_probe:
        probe, _ = find_probe(model.model, fingerprint(*where), eviction.of(ProbeFile).probe)
        facts["probe"] = hashlib.sha256(probe.weights.contiguous().numpy().data).hexdigest()
    text = json.dumps(facts, sort_keys=True, default=str)
    return StoreIdentity(hashlib.sha256(text.encode()).hexdigest(), parallel.tensor_parallel_size)
