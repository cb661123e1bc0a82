"""Models whose output projections cannot be read: which methods serve, which are refused, when."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AfmoeConfig
from vllm import SamplingParams
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.engine.conftest import EngineFactory
from tests.engine.random_models import SHAPE
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.bind.output_projection import _named_after_gates
from vllm_kvselect.engine.bind.trial_run import arguments, in_place_of
from vllm_kvselect.engine.frontend.requests import RequestRefusedError, check_body, check_needs
from vllm_kvselect.registry import METHODS

SIZES = {**SHAPE, "num_hidden_layers": 2, "max_position_embeddings": 512}
PROMPT = [*range(200)]
CHOOSING = {"allow_override": ["method"]}
REFUSED = "methods that weigh entries by the norms of projected values cannot be used with "


def params(method: str | None) -> SamplingParams:
    return SamplingParams(extra_args={"kv_eviction": method} if method else None)


@pytest.fixture
def afmoe(tmp_path: Path) -> Path:
    """Two dense layers whose attention is gated before its projection; vLLM draws the weights."""
    routing = {"num_dense_layers": 2, "n_group": 1, "topk_group": 1, "score_func": "sigmoid"}
    layers = {"layer_types": ["full_attention"] * 2, "architectures": ["AfmoeForCausalLM"]}
    AfmoeConfig(**SIZES, **routing, **layers).save_pretrained(tmp_path / "afmoe")
    return tmp_path / "afmoe"


def offered(refused: pytest.ExceptionInfo[RequestRefusedError]) -> set[str]:
    """The methods that a refusal names instead."""
    found = re.search(r"choose one of (.*) \(parameter", str(refused.value))
    assert found
    return {*found[1].split(", ")}


def test_a_gate_before_the_projection_is_found_and_refused(
    start_small: EngineFactory, afmoe: Path
) -> None:
    reason = rf"{REFUSED}AfmoeForCausalLM: in .*layers\.0.*a gate, changes attention"
    dummy = {"model": afmoe, "load_format": "dummy"}
    with pytest.raises(ConfigError, match=reason), start_small({}, **dummy):
        pass


def test_a_gated_model_serves_methods_without_norms_and_refuses_others_per_request(
    start_small: EngineFactory, afmoe: Path
) -> None:
    eviction, dummy = {**CHOOSING, "method": "adakv"}, {"model": afmoe, "load_format": "dummy"}
    with start_small(eviction, **dummy) as engine:
        asked = [{"kv_eviction": name} for name in ("snapkv", "knorm", "none")]
        answers = engine.outputs([PROMPT] * 4, 4, [*asked, None])
        assert all(len(answer.token_ids) == 4 for answer in answers)
        for method in ("adakv-perturb", "thetakv", "layer-defensivekv"):
            with pytest.raises(RequestRefusedError, match=REFUSED) as caught:
                engine.outputs([PROMPT], 4, [{"kv_eviction": method}])
            assert caught.value.parameter == "extra_args.kv_eviction"
            others = {name for name in METHODS if not METHODS[name].perturbation}
            assert offered(caught) == others >= {"snapkv", "knorm"}


def test_a_model_without_a_known_projection_starts_where_methods_may_be_chosen(
    start_small: EngineFactory, persimmon: Path
) -> None:
    reason = "found 0 output projections"
    with pytest.raises(ConfigError, match=reason), start_small({}, model=persimmon):
        pass
    with start_small({**CHOOSING, "method": "none"}, model=persimmon) as engine:
        (answer,) = engine.outputs([PROMPT], 4, [{"kv_eviction": "adakv"}])
        assert len(answer.token_ids) == 4
        with pytest.raises(RequestRefusedError, match=f"Transformers.*{reason}"):
            engine.outputs([PROMPT], 4, [{"kv_eviction": "adakv-perturb"}])
        assert not engine.llm.llm_engine.has_unfinished_requests()


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
            asyncio.run(check_needs(engine, {"prompt_token_ids": PROMPT}, params("snapkv-perturb")))
    # What is missing is no obstacle to a method that does not need it.
    asyncio.run(check_needs(engine, {"prompt_token_ids": PROMPT}, params("ada-probe")))
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
    asyncio.run(check_needs(engine, {"prompt_token_ids": PROMPT}, params(choice)))
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
