"""Models whose output projections cannot be read: which methods serve, which are refused, when."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AfmoeConfig
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.engine.random_models import SHAPE
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.bind.output_projection import _named_after_gates
from vllm_kvselect.engine.bind.trial_run import arguments, in_place_of
from vllm_kvselect.engine.frontend.requests import (
    RequestRefusedError,
    check_body,
    check_needs,
)
from vllm_kvselect.registry import METHODS

SIZES = {**SHAPE, "num_hidden_layers": 2, "max_position_embeddings": 512}
PROMPT = {"prompt_token_ids": list(range(200))}
REFUSED = "methods that weigh entries by the norms of projected values cannot be used with "


def start(
    folder: Path, load_format: str = "auto", *, language_only: bool = False, **eviction: Any
) -> LLM:
    return LLM(
        str(folder),
        load_format=load_format,
        language_model_only=language_only,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**24,
        additional_config={"kv_eviction": {"method": "adakv-perturb", "budget": 96, **eviction}},
    )


def params(method: str | None, max_tokens: int = 4) -> SamplingParams:
    extra_args = {"kv_eviction": method} if method else None
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, detokenize=False, extra_args=extra_args
    )


@pytest.fixture(autouse=True)
def engine_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def afmoe(tmp_path: Path) -> Path:
    """Two dense layers whose attention is gated before its projection; vLLM draws the weights."""
    routing = {"num_dense_layers": 2, "n_group": 1, "topk_group": 1, "score_func": "sigmoid"}
    layers = {"layer_types": ["full_attention"] * 2, "architectures": ["AfmoeForCausalLM"]}
    AfmoeConfig(**SIZES, **routing, **layers).save_pretrained(tmp_path / "afmoe")
    return tmp_path / "afmoe"


def test_a_gate_before_the_projection_is_found_and_refused(afmoe: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"{REFUSED}AfmoeForCausalLM: in .*layers\.0.*a gate, changes attention"
    ):
        start(afmoe, "dummy", method="adakv-perturb")


def test_a_gated_model_serves_methods_without_norms_and_refuses_others_per_request(
    afmoe: Path,
) -> None:
    llm = start(afmoe, "dummy", method="adakv", allow_override=["method"])
    try:
        choices = ["snapkv", "knorm", "none", None]
        answers = llm.generate([PROMPT] * 4, [params(choice) for choice in choices], use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == 4 for answer in answers)
        for method in ("adakv-perturb", "thetakv", "layer-defensivekv"):
            with pytest.raises(RequestRefusedError, match=REFUSED) as caught:
                llm.generate(PROMPT, params(method), use_tqdm=False)
            assert caught.value.parameter == "extra_args.kv_eviction"
            offered = re.search(r"choose one of (.*) \(parameter", str(caught.value))
            assert offered
            others = {name for name in METHODS if not METHODS[name].perturbation}
            assert {*offered[1].split(", ")} == others >= {"snapkv", "knorm"}
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_a_model_without_a_known_projection_starts_where_methods_may_be_chosen(
    persimmon: Path,
) -> None:
    with pytest.raises(ConfigError, match="found 0 output projections"):
        start(persimmon, method="snapkv-perturb")
    llm = start(persimmon, method="none", allow_override=["method"])
    try:
        (answer,) = llm.generate(PROMPT, params("adakv"), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 4
        with pytest.raises(RequestRefusedError, match=r"Transformers.*found 0 output projections"):
            llm.generate(PROMPT, params("adakv-perturb"), use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
    finally:
        llm.llm_engine.engine_core.shutdown()


class AsyncEngine:
    """What `AsyncLLM` is to the checks: a configuration and workers that can be asked."""

    logger_manager = None

    def __init__(self, method: str, answers: list[dict[str, str]]) -> None:
        values = {"method": method, "budget": 96, "allow_override": ["method"]}
        self.vllm_config = SimpleNamespace(additional_config={"kv_eviction": values})
        self.answers, self.asked = answers, []

    async def collective_rpc(self, method: str) -> list[dict[str, str]]:
        self.asked.append(method)
        return self.answers


def test_the_workers_are_asked_once_and_one_without_projections_is_enough() -> None:
    engine = AsyncEngine("adakv", [{}, {"output projection": "no projections here"}])
    body = CompletionRequest(prompt="a", vllm_xargs={"kv_eviction": "thetakv"})
    for _ in range(2):
        with pytest.raises(RequestRefusedError, match="no projections here") as caught:
            asyncio.run(check_body(engine, body))
        assert caught.value.parameter == "vllm_xargs.kv_eviction"
        with pytest.raises(RequestRefusedError, match="no projections here"):
            asyncio.run(check_needs(engine, PROMPT, params("snapkv-perturb")))
    # What is missing is no obstacle to a method that does not need it.
    asyncio.run(check_needs(engine, PROMPT, params("ada-probe")))
    assert engine.asked == ["kv_eviction_problems"]


@pytest.mark.parametrize(
    ("server", "choice", "asks"),
    [
        ("adakv", "thetakv", True),
        ("none", "snapkv-perturb", True),
        ("adakv-perturb", "thetakv", False),  # would not have started
        ("adakv", "ada-probe", True),
        ("adakv-perturb", "ada-probe", True),
        ("ada-probe", "keydiff", False),
        ("adakv", "snapkv", False),
        ("adakv", "none", False),
        ("adakv", None, False),
    ],
)
def test_workers_are_asked_only_when_the_answer_matters(
    server: str, choice: str | None, asks: bool
) -> None:
    engine = AsyncEngine(server, [{}])
    asyncio.run(check_needs(engine, PROMPT, params(choice)))
    assert bool(engine.asked) is asks


class Gated(nn.Module):
    """An attention module that cannot be called on positions and hidden states alone."""

    def __init__(self) -> None:
        super().__init__()
        self.g_proj, self.qkv_proj, self.o_proj = (nn.Linear(2, 2) for _ in range(3))
        self.attn_output_gate, self.use_gate, self.layer = True, False, 1

    def forward(self, hidden_states: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_modules_that_cannot_be_called_are_judged_by_their_names() -> None:
    module = Gated()
    assert arguments(module, torch.zeros(1), torch.ones(1, 2)) is None
    assert _named_after_gates(module) == ["g_proj", "attn_output_gate"]


def test_a_trial_run_leaves_the_layer_as_it_was() -> None:
    layer = nn.Linear(2, 2)
    given = torch.ones(1, 2)
    before = layer(given)
    with in_place_of(layer, lambda _: given):
        assert layer(before) is given
    assert torch.equal(layer(given), before)
    assert "forward" not in vars(layer)
