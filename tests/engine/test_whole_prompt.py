"""Sums over a prompt's chunks: begun with its first token, continued without a gap, begun again."""

from itertools import pairwise

import pytest
import torch

from tests.strategies import Shape, random_layer
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.prompts import Prompt
from vllm_kvselect.engine.whole_prompt import PromptChunk, prompt_chunk, scorer_of
from vllm_kvselect.scoring.h2o import h2o_scores

BLOCK_SIZE, NUM_LAYERS = 8, 2
SHAPE = Shape(2, 3, 8, BLOCK_SIZE, 3, 51, 2)
LAYERS = [random_layer(SHAPE, layer, torch.float32) for layer in range(NUM_LAYERS)]


def make_prompt(method: str = "h2o") -> Prompt:
    config = EvictionConfig.parse({"method": method, "budget": 16, "window": 3})
    return Prompt.planned(SHAPE.num_prompt_tokens, BLOCK_SIZE, config)


def add(prompt: Prompt, first_position: int, end: int, row_start: int = 0) -> PromptChunk:
    """A chunk of the prompt at `row_start` of a batch, added in every layer."""
    tokens = slice(row_start, row_start + end - first_position)
    blocks = torch.arange(1, 1 + -(-end // BLOCK_SIZE))
    sizes = (NUM_LAYERS, SHAPE.num_kv_heads)
    chunk = prompt_chunk(prompt, tokens, first_position, blocks, *sizes)
    assert chunk is not None
    assert chunk.end == end
    for index, layer in enumerate(LAYERS):
        others = torch.full((row_start, *layer.prompt_query.shape[1:]), torch.nan)
        query = torch.cat((others, layer.prompt_query[first_position:end]))
        chunk.add(index, query, layer.key[:, :end], SHAPE.scale, None)
    return chunk


def check_complete(prompt: Prompt) -> None:
    assert prompt.sums is not None
    assert prompt.sums.dtype == torch.float32
    assert prompt.num_summed == SHAPE.num_prompt_tokens
    for sums, layer in zip(prompt.sums, LAYERS, strict=True):
        inputs = layer.prompt_query, layer.key, SHAPE.scale, prompt.eviction
        scores = scorer_of(sums, prompt.eviction.window)(*inputs, 0)
        torch.testing.assert_close(scores, h2o_scores(*inputs), rtol=1e-5, atol=0)


@pytest.mark.parametrize("cuts", [(), (1,), (16, 32, 48), (7, 50)])
def test_chunks_of_any_size_give_the_scores(cuts: tuple[int, ...]) -> None:
    prompt = make_prompt()
    borders = [0, *cuts, SHAPE.num_prompt_tokens]
    for row_start, (start, end) in enumerate(pairwise(borders)):
        add(prompt, start, end, row_start)
    check_complete(prompt)


def test_a_prompt_that_begins_again_starts_from_zero() -> None:
    prompt = make_prompt()
    add(prompt, 0, 30)
    add(prompt, 0, 20)
    add(prompt, 20, SHAPE.num_prompt_tokens)
    check_complete(prompt)


@pytest.mark.parametrize("first_position", [8, 30, 32])
def test_a_gap_is_an_error(first_position: int) -> None:
    prompt = make_prompt()
    add(prompt, 0, 31)
    with pytest.raises(
        RuntimeError, match=f"summed 31 tokens of a prompt.* on at {first_position}"
    ):
        add(prompt, first_position, 40)
    fresh = make_prompt()
    with pytest.raises(RuntimeError, match="summed 0 tokens"):
        add(fresh, first_position, 40)


@pytest.mark.parametrize("method", ["snapkv", "layer-thetakv"])
def test_other_methods_sum_nothing(method: str) -> None:
    prompt = make_prompt(method)
    assert prompt_chunk(prompt, slice(0, 8), 0, torch.ones(1), 1, 1) is None
    assert prompt.sums is None
