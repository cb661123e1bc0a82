"""Configurations of vLLM as its front end makes them, for tests of what is refused at start-up."""

import json
from functools import reduce
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.tiny_model import tiny_model

EVICTION = EvictionConfig(method="adakv-perturb")
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def create(eviction: dict[str, Any], **settings: Any) -> Any:
    load_general_plugins()
    settings = {"model": str(tiny_model()), "max_model_len": 2048, **settings}
    if isinstance(eviction, dict):
        eviction = {"method": "adakv-perturb", **eviction}
    args = EngineArgs(**settings, additional_config={"kv_eviction": eviction})
    return args.create_engine_config()


def written(folder: Path, **config: Any) -> dict[str, Any]:
    """Writes the config of a small model, and says how to start with it."""
    (folder / "config.json").write_text(json.dumps(SMALL | config))
    return {"model": str(folder), "skip_tokenizer_init": True}


def drafting(method: str, **settings: Any) -> VllmConfig:
    """A finished configuration, as `refuse_unsupported` sees it."""
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    vllm_config = create({}, speculative_config=ngram, **settings)
    vllm_config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
    vllm_config.speculative_config.method = method
    return vllm_config


def set_to(config: Any, path: str, value: Any) -> None:
    """Changes a field of a finished configuration, or of a section of it."""
    *sections, name = path.split(".")
    setattr(reduce(getattr, sections, config), name, value)


class CudaPlatform:
    """vLLM's words for a machine with a GPU."""

    device_type, device_name = "cuda", "cuda"

    @staticmethod
    def is_cpu() -> bool:
        return False

    @staticmethod
    def is_cuda() -> bool:
        return True

    @staticmethod
    def get_device_capability() -> DeviceCapability:
        return DeviceCapability(9, 0)
