"""W_O is bound through each layer's own forward, quantised weights included."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import SHALLOW_LAYERS, EngineFactory
from vllm_kvselect.kernels import cpu
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.scoring.value_norms import OutputProjection

CAPABILITIES = torch.cpu.get_capabilities()
HAS_VNNI = CAPABILITIES.get("avx512_vnni") or CAPABILITIES.get("avx_vnni")


def expected_projections(model: Path) -> list[torch.Tensor]:
    """`[num_kv_heads, head_size, group, hidden_size]` from the checkpoint, in float32."""
    weights = load_file(model / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(SHALLOW_LAYERS)]
    return [weights[n].float().T.view(3, 3, 64, 576).transpose(1, 2) for n in names]


@pytest.fixture
def int8_model(tmp_path: Path, shallow_model: Path) -> Path:
    """The shallow model with int8 weights, one scale per output channel, and int8 activations."""
    folder = tmp_path / "int8"
    shutil.copytree(shallow_model, folder)
    weights = {}
    for name, weight in load_file(shallow_model / "model.safetensors").items():
        if "_proj." not in name:
            weights[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weight.float() / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the worker makes of the layers' projections, before it is packed for the kernels."""
    made = []

    def pack(projection: OutputProjection, pack: Any = cpu.pack) -> OutputProjection:
        made.append(projection.weight)
        return pack(projection)

    monkeypatch.setattr(cpu, "pack", pack)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projections_are_the_checkpoints(
    dtype: str, start_engine: EngineFactory, shallow_model: Path, weights: list[torch.Tensor]
) -> None:
    with start_engine({"method": "snapkv-perturb"}, 80, dtype=dtype) as engine:
        bound, made = [impl.output_projection for impl in engine.impls], weights.copy()
    for projection, weight in zip(bound, made, strict=True):
        assert torch.equal(projection.packed, cpu.pack(OutputProjection.of(weight)).packed)
        assert projection.weight.is_meta  # what is read is in memory once
    for actual, expected in zip(made, expected_projections(shallow_model), strict=True):
        assert actual.is_contiguous()
        assert torch.equal(actual.float(), expected)


def test_quantised_projections_are_those_the_layer_applies(
    start_engine: EngineFactory,
    make_prompts: Any,
    shallow_model: Path,
    int8_model: Path,
    weights: list[torch.Tensor],
) -> None:
    settings = {"model": int8_model, "dtype": dtype_name(fast_dtype())}
    with start_engine({"method": "adakv-perturb", "budget": 128}, 80, **settings) as engine:
        assert len(engine.generate(make_prompts([600]), 16)[0].token_ids) == 16
        assert len(engine.impls) == len(weights)
    for actual, expected in zip(weights, expected_projections(shallow_model), strict=True):
        # Symmetric int8 by output channel: off by half a step of the channel's largest weight,
        # and by the rounding of the result, to bfloat16 at worst.
        largest = expected.abs().amax(dim=(0, 1, 2))
        close = (actual.float() - expected).abs() <= largest * (0.51 / 127 + 2.0**-8)
        # Without VNNI the layer's own int8 products saturate in 16 bits (oneDNN, "Nuances of int8
        # computations"), and the layer applies a few weights that are far off.
        assert close.all() if HAS_VNNI else close.double().mean() > 0.99
        assert not torch.equal(actual.float(), expected)


def test_methods_without_perturbation_bind_nothing(start_engine: EngineFactory) -> None:
    with start_engine({"method": "adakv"}, 80) as engine:
        assert all(impl.output_projection is None for impl in engine.impls)
