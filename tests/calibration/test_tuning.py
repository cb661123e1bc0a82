"""What the tuning makes better, and what it leaves alone."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vllm_kvselect.calibration.calibration import read_contexts
from vllm_kvselect.calibration.fit import fit
from vllm_kvselect.calibration.normal_equations import Spread
from vllm_kvselect.calibration.quality import BUDGETS, divergences
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.teacher import features_of
from vllm_kvselect.calibration.tuning import _gates, _loss, _pace, tuned
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.models import load_model
from vllm_kvselect.tiny_model import shallow_copy, tiny_model

CONFIG = CalibrationConfig(texts=("pairs",), tokens=512, length=256, steps=10, part=32, rate=0.03)


@pytest.fixture(scope="module")
def contexts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return read_contexts(tokenizer, CONFIG)


@pytest.fixture(scope="module")
def fitted(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, contexts: list[list[int]]
) -> tuple[torch.Tensor, Spread]:
    return fit(llama, tokenizer, contexts, CONFIG)


def test_the_text_is_repeated_more_like_with_the_full_cache(
    tokenizer: PreTrainedTokenizerBase, contexts: list[list[int]], tmp_path: Path
) -> None:
    """By the small model's first layers: random weights read nothing that could be kept."""
    model = load_model(str(shallow_copy(tiny_model(), 2, tmp_path / "model")), "float32")
    context, steps = contexts[0], []
    weights, spread = fit(model, tokenizer, [context], CONFIG)
    better = tuned(
        model, tokenizer, weights, spread, [context], CONFIG, lambda: steps.append(len(steps))
    )
    assert len(steps) == CONFIG.steps
    assert better.shape == weights.shape
    assert better.dtype == torch.float32
    found = divergences(model, tokenizer, context, [weights, better], CONFIG.part)
    assert found.shape == (2, len(BUDGETS))
    assert (found[1] < 0.8 * found[0]).all(), found


def test_without_steps_the_fit_remains(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fitted: tuple[torch.Tensor, Spread]
) -> None:
    config = CONFIG.model_copy(update={"steps": 0})
    same = tuned(llama, tokenizer, *fitted, [[0]], config)
    torch.testing.assert_close(same, fitted[0])


def test_first_tokens_have_no_gate_and_take_no_budget() -> None:
    scores = torch.randn(2, 3, 104, generator=torch.Generator().manual_seed(0)) - 5
    gates = _gates(scores, softness=0.3)
    assert (gates[..., :4] == 0).all()
    sums = gates[..., 4:].exp().sum(dim=(1, 2, 3))
    torch.testing.assert_close(sums, 600 * torch.tensor([1 / 4, 1 / 8, 1 / 16, 1 / 32]))


def test_a_token_that_is_lost_counts_for_more_than_its_part() -> None:
    even, one_lost = torch.full((2, 4), 0.5), torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.5] * 4])
    assert _loss(even).item() == pytest.approx(0.5)
    assert _loss(one_lost).item() == pytest.approx((0.5 + (1.0 + 0.5) / 2) / 2)
    nothing_lost = torch.zeros(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(_loss(nothing_lost), nothing_lost)
    assert gradient.isfinite().all()


def test_the_first_step_goes_half_as_far_as_its_rate(
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contexts: list[list[int]],
    fitted: tuple[torch.Tensor, Spread],
) -> None:
    """Adam's first step is the rate itself, up or down; here a tenth of it, to warm up."""
    weights, spread = fitted
    config = CONFIG.model_copy(update={"steps": 1})
    found = tuned(llama, tokenizer, weights, spread, contexts, config)
    moved = spread.in_units(found.double()) - spread.in_units(weights.double())
    step = moved.abs()[moved.abs() > 1e-5]  # what no score depends on stays
    torch.testing.assert_close(step.median().item(), CONFIG.rate / 10 / 2, rtol=1e-2, atol=0)


def test_the_rate_goes_up_and_then_down() -> None:
    rates = [_pace(step, 100) for step in range(100)]
    assert rates.index(max(rates)) == 9
    assert sorted(rates[9:], reverse=True) == rates[9:]
    assert 0 < rates[-1] < 0.01


def test_a_spread_is_that_of_the_features_and_changes_no_score(
    llama: PreTrainedModel, contexts: list[list[int]], fitted: tuple[torch.Tensor, Spread]
) -> None:
    weights, spread = fitted
    in_units = spread.in_units(weights.double())
    torch.testing.assert_close(spread.of_features(in_units), weights.double())
    by_text = [list(features_of(capture(llama, context))) for context in contexts]
    for layer, features in enumerate(torch.cat(each, dim=1) for each in zip(*by_text, strict=True)):
        wide = features.double()
        mean, deviation = wide.mean(dim=1).T, wide.std(dim=1, correction=0).T
        mean[-1], deviation[-1] = 0, 1
        torch.testing.assert_close(spread.mean[layer], mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(spread.deviation[layer], deviation, rtol=1e-5, atol=1e-6)
        standard = (wide - mean.T.unsqueeze(1)) / deviation.T.unsqueeze(1)
        torch.testing.assert_close(
            torch.einsum("hnf,fh->hn", standard, in_units[layer]),
            torch.einsum("hnf,fh->hn", wide, weights[layer].double()),
        )
