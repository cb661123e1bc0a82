"""vLLM's own planning of the KV cache, with our specs: groups, and where layers lie in memory."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.models import refuse_mixed_groups
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec, WindowSpec, with_eviction
from vllm_kvselect.engine.view.memory import all_layers, refuse_scattered_layers
from vllm_kvselect.tiny_model import tiny_model

BLOCK_SIZE, NUM_LAYERS = 32, 4
SHAPE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": torch.float32,
}
EVICTION = EvictionConfig(method="adakv", budget=128)


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    config = EngineArgs(
        str(tiny_model()), max_model_len=512, block_size=BLOCK_SIZE
    ).create_engine_config()
    config.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name
    return config


def plan(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """What vLLM makes of the layers of one worker."""
    memory = [4 * 2**20]
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):  # until 0.33 is the oldest release
        return kv_cache_utils.get_kv_cache_configs(config, [specs], memory)[0]
    from vllm.v1.core import kv_cache_planning

    groups = kv_cache_planning.get_global_kv_cache_groups(config, [specs])
    return kv_cache_planning.get_kv_cache_configs(config, [specs], memory, groups)[0]


def layers(kind: type[KVCacheSpec], name: str, **values: Any) -> dict[str, KVCacheSpec]:
    spec = with_eviction(kind(**SHAPE, **values), EVICTION)
    return {f"{name}.{index}": spec for index in range(NUM_LAYERS)}


def test_layers_of_one_shape_are_one_group_in_one_piece_of_memory(vllm_config: VllmConfig) -> None:
    planned = plan(vllm_config, layers(FullAttentionSpec, "full"))
    (group,) = planned.kv_cache_groups
    assert type(group.kv_cache_spec) is HeadwiseSpec
    assert group.kv_cache_spec.eviction == EVICTION
    refuse_mixed_groups(planned, vllm_config)
    caches = allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout.LBHNC, [BLOCK_SIZE])
    in_order = [caches[name] for name in group.layer_names]
    refuse_scattered_layers(in_order)
    view = all_layers(in_order[0])
    assert len(view) == NUM_LAYERS * planned.num_blocks
    in_order[2][5].fill_(7)
    assert view[2 * planned.num_blocks + 5].eq(7).all()


def test_windows_beside_get_groups_of_their_own_in_the_same_memory(vllm_config: VllmConfig) -> None:
    specs = layers(FullAttentionSpec, "full") | layers(SlidingWindowSpec, "w", sliding_window=64)
    planned = plan(vllm_config, specs)
    kinds = [type(group.kv_cache_spec) for group in planned.kv_cache_groups]
    assert sorted(kinds, key=str) == [HeadwiseSpec, WindowSpec]
    with pytest.raises(ConfigError, match="disagree on which of them have a sliding window"):
        refuse_mixed_groups(planned, vllm_config)  # this model's config says that it has none
    sizes = [BLOCK_SIZE] * len(kinds)
    caches = allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout.LBHNC, sizes)
    (full,) = (g for g in planned.kv_cache_groups if type(g.kv_cache_spec) is HeadwiseSpec)
    refuse_scattered_layers([caches[name] for name in full.layer_names])


def test_layers_of_two_shapes_are_refused(vllm_config: VllmConfig) -> None:
    wide = FullAttentionSpec(**{**SHAPE, "num_kv_heads": 4})
    specs = layers(FullAttentionSpec, "full") | {"wide": with_eviction(wide, EVICTION)}
    with pytest.raises(ConfigError, match="full-attention layers of one shape"):
        refuse_mixed_groups(plan(vllm_config, specs), vllm_config)


@pytest.mark.skipif(
    "is_draft" not in {field.name for field in fields(FullAttentionSpec)},
    reason="specs say from 0.33 on whether a draft model owns their layer",
)
def test_a_draft_models_layer_keeps_its_mark() -> None:
    draft = replace(FullAttentionSpec(**SHAPE), is_draft=True)
    assert with_eviction(draft, EVICTION).is_draft
