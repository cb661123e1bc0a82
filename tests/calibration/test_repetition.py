"""Repetition behind gates, against the offline room's run on dropped entries."""

import copy
import math

import pytest
import torch
from papers.continuation import continue_prompt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.engine.random_hybrids import granite_h
from tests.offline.conftest import NUM_KV_HEADS, NUM_LAYERS
from vllm_kvselect.calibration.repetition import divergence, repeated
from vllm_kvselect.offline.capture import Layer, capture
from vllm_kvselect.offline.kvzip import Chunk, chunks

NUM_TOKENS = 96


@pytest.fixture(scope="module")
def exact(llama: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(llama).double()


@pytest.fixture(scope="module")
def chunk(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> Chunk:
    return list(chunks(tokenizer, token_ids, 40))[1]


@pytest.fixture(scope="module")
def layers(exact: PreTrainedModel, token_ids: list[int]) -> list[Layer]:
    return capture(exact, token_ids)


def some_entries(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(*shape, generator=generator) < torch.tensor([1.0, 0.5, 0.1])[:, *[None] * 3]


def test_closed_gates_hide_what_is_dropped(
    exact: PreTrainedModel, layers: list[Layer], token_ids: list[int], chunk: Chunk
) -> None:
    """Three ways at once, and each is as if it were alone."""
    retained = some_entries(3, NUM_LAYERS, NUM_KV_HEADS, NUM_TOKENS)
    gates = torch.zeros(retained.shape, dtype=torch.float64).masked_fill(~retained, -torch.inf)
    with torch.no_grad():
        found = repeated(exact, layers, token_ids, chunk, gates)
    assert found.shape == (3, chunk.stop - chunk.start, exact.config.vocab_size)
    for logits, entries in zip(found, retained, strict=True):
        run = continue_prompt(exact, layers, token_ids, chunk.token_ids, entries)
        expected = run.logits[-len(logits) - 1 : -1]
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found[0], found[2], atol=1e-2)


def test_of_a_hybrid_the_context_runs_again(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int]
) -> None:
    torch.manual_seed(0)
    model = granite_h().eval()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    layers = capture(model, token_ids)
    chunk = next(chunks(tokenizer, token_ids, 40))
    retained = some_entries(3, len(layers), len(layers[0].key), NUM_TOKENS)
    gates = torch.zeros(retained.shape).masked_fill(~retained, -torch.inf)
    with torch.no_grad():
        found = repeated(model, layers, token_ids, chunk, gates)
    for logits, entries in zip(found, retained, strict=True):
        run = continue_prompt(model, layers, token_ids, chunk.token_ids, entries)
        expected = run.logits[-len(logits) - 1 : -1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_gradients_of_the_gates_are_those_of_differences(
    exact: PreTrainedModel, layers: list[Layer], token_ids: list[int], chunk: Chunk
) -> None:
    """The model's norms are float32 whatever its weights are, so the step is not a small one."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, NUM_LAYERS, NUM_KV_HEADS, NUM_TOKENS)
    gates = torch.randn(shape, generator=generator, dtype=torch.float64) - 1
    gates.requires_grad_()

    def loss(log_gates: torch.Tensor) -> torch.Tensor:
        return repeated(exact, layers, token_ids, chunk, log_gates).square().mean()

    (gradient,) = torch.autograd.grad(loss(gates), gates)
    assert gradient.norm() > 1e-3
    for way in (gradient, gradient.roll(1, dims=1), gradient.flip(3) + gradient):
        step = 0.02 * way / way.norm()
        with torch.no_grad():
            difference = (loss(gates + step) - loss(gates - step)) / 2
        torch.testing.assert_close((gradient * step).sum(), difference, rtol=2e-2, atol=2e-7)


def test_divergence_is_kullbacks_and_leiblers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    full = 3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    found = divergence(logits, full)
    assert found.shape == (2, 4)
    for of_way, way in zip(found.tolist(), logits.tolist(), strict=True):
        for nats, row, of_full in zip(of_way, way, full.tolist(), strict=True):
            q, p = ([math.exp(each) for each in part] for part in (row, of_full))
            q, p = ([each / sum(part) for each in part] for part in (q, p))
            expected = sum(b * math.log(b / a) for a, b in zip(q, p, strict=True))
            assert nats == pytest.approx(expected, rel=1e-12)
    assert divergence(full, full).tolist() == pytest.approx([0.0] * 4, abs=1e-15)
