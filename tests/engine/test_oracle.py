"""The right entries and the right arithmetic: float64 oracles on the real model's tensors.

The oracles share no code with the package: they see recorded queries, keys and values, the
checkpoint's own W_O and, for the arithmetic, the set of retained entries.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.conftest import SHALLOW_LAYERS, EngineFactory, _sharing
from tests.engine.float64 import (
    BLOCK_SIZE,
    BUDGET,
    WINDOW,
    Expected,
    Layer,
    expect,
    num_packed,
    tail_begin,
)
from tests.engine.recorder import Recorder, recording
from tests.method_cases import SERVED_CASES, MethodCase
from tests.probe_files import probe_of
from vllm_kvselect.choice import Retention, retain
from vllm_kvselect.kernels import cpu
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.scoring.value_norms import OutputProjection

PROMPT_LENS = (500, 351, 300)
UNIT = 2.0**-24
"""Unit roundoff of float32."""

METHODS_ALONE = [case for case in SERVED_CASES if not case.values]
WITH_PARAMETERS = [case for case in SERVED_CASES if len(case.values) > 2]
"""An engine takes seconds to start. One lets its requests choose among all methods, some start with
several parameters; the other cases run on tensors recorded once."""


def record(
    start: EngineFactory,
    eviction: dict[str, Any],
    make_prompts: Any,
    settings: dict[str, Any] | None = None,
) -> Recorder:
    """Three requests at once, their prompts in chunks of at most 256 tokens."""
    eviction = {"budget": BUDGET, **eviction}
    limits = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "enable_prefix_caching": False}
    with (
        start(eviction, 100, **limits) as engine,
        recording(engine.worker.model_runner) as recorder,
    ):
        engine.generate(make_prompts(PROMPT_LENS), 8, [settings] * len(PROMPT_LENS))
    return recorder


def record_method(share: EngineFactory, make_prompts: Any, method: str) -> Recorder:
    """What a method does, in the engine that all share."""
    return record(share, {"allow_override": ["method"]}, make_prompts, {"kv_eviction": method})


def prompt_layers(recorded: Any, model: Path, prompt_len: int) -> list[Layer]:
    """The layers' tensors of one prompt."""
    theta = json.loads((model / "config.json").read_text())["rope_parameters"]["rope_theta"]
    weights, probes = load_file(model / "model.safetensors"), load_file(probe_of(model))["weights"]
    layers = []
    for index in range(SHALLOW_LAYERS):
        tensors = recorded[prompt_len, index]
        prompt = (tensors[name][:prompt_len] for name in ("query", "key", "value"))
        projection = weights[f"model.layers.{index}.self_attn.o_proj.weight"].double()
        layers.append(Layer(*prompt, projection, theta=theta, probe=probes[index]))
    return layers


@pytest.mark.xdist_group("oracle")
@pytest.mark.parametrize("case", METHODS_ALONE, ids=lambda case: case.name)
def test_every_method_retains_and_attends_as_the_oracles(
    case: MethodCase, share_engine: EngineFactory, make_prompts: Any, shallow_model: Path
) -> None:
    check(case, record_method(share_engine, make_prompts, case.method), shallow_model)


@pytest.mark.parametrize("case", WITH_PARAMETERS, ids=lambda case: case.name)
def test_parameters_of_the_server_reach_the_choice(
    case: MethodCase, start_engine: EngineFactory, make_prompts: Any, shallow_model: Path
) -> None:
    recorder = record(start_engine, {"method": case.method, **case.values}, make_prompts)
    check(case, recorder, shallow_model)


def check(case: MethodCase, recorder: Recorder, model: Path) -> None:
    """What a layer retains, or a pool of layers, and what tokens attend to."""
    tokens = recorder.tokens
    assert len(tokens) == len(PROMPT_LENS) * SHALLOW_LAYERS
    for prompt_len in PROMPT_LENS:
        layers = prompt_layers(tokens, model, prompt_len)
        retained = [recorder.retained[prompt_len, index] for index in range(SHALLOW_LAYERS)]
        for index, of_layer in enumerate(retained):
            check_attention(prompt_len, tokens[prompt_len, index], of_layer)
        if METHODS[case.method].pooled:
            num_heads = layers[0].key.shape[1]
            owners = [
                (index * num_heads + head, token)
                for index, of_layer in enumerate(retained)
                for head, token in of_layer
            ]
            check_heads(set(owners), expect(case, layers))
            continue
        for index, (layer, of_layer) in enumerate(zip(layers, retained, strict=True)):
            check_heads(of_layer, expect(case, [layer], index))


@pytest.fixture(scope="module")
def real_layers(make_prompts: Any, shallow_model: Path) -> list[Layer]:
    """One prompt in the real model's layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        share = partial(_sharing, model=shallow_model)
        recorder = record_method(share, make_prompts, "streaming-llm")
    return prompt_layers(recorder.tokens, shallow_model, 351)


@pytest.mark.xdist_group("oracle")
@pytest.mark.parametrize("case", SERVED_CASES, ids=lambda case: case.name)
def test_methods_choose_from_real_tensors_as_the_oracles(
    case: MethodCase, real_layers: list[Layer]
) -> None:
    """Both with the references and with the kernels."""
    num_tokens = tail_begin(len(real_layers[0].query))
    if METHODS[case.method].pooled:
        expected = [expect(case, real_layers)]
    else:
        expected = [expect(case, [layer], index) for index, layer in enumerate(real_layers)]
    for parts in (REFERENCES, cpu.load()):
        for retention, heads in zip(choose(case, real_layers, parts), expected, strict=True):
            flat = retention.retained.tolist()
            check_heads({divmod(index, num_tokens) for index in flat}, heads)


def choose(case: MethodCase, layers: list[Layer], parts: Kernels) -> list[Retention]:
    """What the package retains of layers that share pages, or of each."""
    size = (num_packed(len(layers[0].query)), BLOCK_SIZE, case.config())
    packed = parts is not REFERENCES
    given = [inputs(case, layer, packed, index) for index, layer in enumerate(layers)]
    if not METHODS[case.method].pooled:
        return [retain([each], *size, kernels=parts) for each in given]
    return [retain(given, *size, kernels=parts)]


def inputs(case: MethodCase, layer: Layer, kernels: bool, index: int = 0) -> ScoringInputs:
    """What the package is given, in float32; W_O packed for kernels."""
    num_tokens, num_kv_heads, size = layer.key.shape
    query, key, value = (tensor.float() for tensor in layer[:3])
    query = query[-WINDOW:]
    # [hidden, heads * size] -> [num_kv_heads, size, group, hidden]
    weight = layer.projection.view(-1, num_kv_heads, layer.group, size).permute(1, 3, 2, 0)
    projection = OutputProjection.of(weight.contiguous().float())
    if kernels:
        projection = cpu.pack(projection)
    value = value[: tail_begin(num_tokens)].transpose(0, 1)
    key = key.transpose(0, 1)
    return ScoringInputs(
        query,
        key,
        value,
        size**-0.5,
        projection,
        layer_index=index,
        rotation=rotation(layer.theta, size) if "rotation" in METHODS[case.method].needs else None,
        probe=layer.probe,
    )


def rotation(theta: float, size: int) -> Rotation:
    """Tables of a rotary embedding, computed in float64 and rounded."""
    angles = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = torch.arange(1024, dtype=torch.float64)[:, None] * angles
    return Rotation(turns.cos().float(), turns.sin().float())


def check_heads(retained: set[tuple[int, int]], expected: list[Expected]) -> None:
    for head, of_head in enumerate(expected):
        actual = {token for owner, token in retained if owner == head}
        assert len(actual) == of_head.count
        of_head.check(actual)


def check_attention(
    prompt_len: int, tensors: dict[str, torch.Tensor], retained: set[tuple[int, int]]
) -> None:
    """Every token's attention output, prompt and decode, from the set of entries it may see."""
    query, key, value, output = (tensors[name] for name in ("query", "key", "value", "output"))
    num_kv_heads, size = key.shape[1:]
    group = query.shape[1] // num_kv_heads
    for position in [prompt_len // 2, prompt_len - 1, *range(prompt_len, len(query))]:
        for kv_head in range(num_kv_heads):
            seen = range(position + 1)
            if position >= prompt_len:
                packed = [token for head, token in retained if head == kv_head]
                seen = [*packed, *range(tail_begin(prompt_len), position + 1)]
            k, v = key[list(seen), kv_head], value[list(seen), kv_head]
            for head in range(kv_head * group, (kv_head + 1) * group):
                logits = k @ query[position, head] * size**-0.5
                expected = torch.softmax(logits, 0) @ v
                error = (output[position, head] - expected).abs().max()
                assert error <= attention_bound(query[position, head], k, v)


def attention_bound(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Largest float32 error of `softmax(q k) v`, to first order, for any order of the sums.

    A logit is a sum of `d` products: off by at most `(d + 2) u |q|_1-wise`, bounded by Cauchy and
    Schwarz. A weight is then off by twice that, relatively, from its exp and from the sum of all,
    plus the roundings of the sum over n entries and of exp (taken as 4 u). The output is a convex
    combination, so these carry over times the largest value, twice for weights and products.
    """
    size, num_entries = key.shape[1], key.shape[0]
    logit = (size + 2) * UNIT * query.norm() * key.norm(dim=1).max() * size**-0.5
    return float((2 * logit + 2 * (num_entries + 4) * UNIT) * 2 * value.abs().max())
