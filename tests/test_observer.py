"""Observers: begun with the first token that counts, continued without a gap, the same scores."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.strategies import Shape, random_layer, scoring_inputs
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.methods.choice import score_layer
from vllm_kvselect.methods.registry import METHODS
from vllm_kvselect.scoring.observer import Observer
from vllm_kvselect.scoring.value_norms import OutputProjection

NUM_LAYERS = 2
SHAPE = Shape(2, 3, 8, 8, 3, 51, 2)
COMPETING = slice(SHAPE.num_tokens)
LAYERS = [random_layer(SHAPE, layer, torch.float32, with_sinks=True) for layer in range(NUM_LAYERS)]


def make_config(method: str) -> EvictionConfig:
    return EvictionConfig.parse({"method": method, "budget": 16, "window": SHAPE.window})


def make_observer(method: str) -> Observer:
    observer = METHODS[method].observer_class
    return observer(SHAPE.num_prompt_tokens, NUM_LAYERS, make_config(method))


def inputs(index: int, query: slice, key: slice, value: slice = COMPETING) -> Any:
    layer = LAYERS[index]
    projection = OutputProjection.of(layer.output_projection)
    tensors = layer.prompt_query[query], layer.key[:, key], SHAPE.scale, layer.value[:, value]
    return scoring_inputs(*tensors, projection, layer.sinks, index, probe=layer.probe)


def observe(observer: Observer, start: int, end: int) -> None:
    """A chunk, as far as the observer asks for it, in every layer."""
    first = max(start, observer.first_position)
    if first >= end:
        return
    for index in range(NUM_LAYERS):
        key = slice(0 if observer.reads_earlier_keys else first, end)
        chunk = slice(first, end)
        observer.observe(inputs(index, chunk, key, chunk), first)


def check_scores(method: str, observer: Observer) -> None:
    """They are those of the whole prompt seen at once."""
    config, everything = make_config(method), slice(0, SHAPE.num_prompt_tokens)
    seen = everything if observer.whole_prompt else slice(-SHAPE.window, None)
    for index in range(NUM_LAYERS):
        expected = score_layer(inputs(index, seen, everything), config)
        found = score_layer(inputs(index, slice(0), everything), config, observer=observer)
        for part, own in zip(found, expected, strict=True):
            assert (part is None) == (own is None)
            if part is not None and own is not None:
                torch.testing.assert_close(part, own, rtol=1e-5, atol=0)


@pytest.mark.parametrize("cuts", [(), (1,), (16, 32, 48), (7, 50), (49,), (48, 49, 50)])
@pytest.mark.parametrize("method", METHODS)
def test_chunks_of_any_size_give_the_scores(method: str, cuts: tuple[int, ...]) -> None:
    observer = make_observer(method)
    for start, end in pairwise([0, *cuts, SHAPE.num_prompt_tokens]):
        observe(observer, start, end)
    check_scores(method, observer)


@pytest.mark.parametrize("first_position", [8, 30, 32])
def test_a_gap_is_an_error(first_position: int) -> None:
    observer = make_observer("h2o")
    observe(observer, 0, 31)
    with pytest.raises(RuntimeError, match=f"up to token 31, and it goes on at {first_position}"):
        observe(observer, first_position, 40)


def test_a_window_that_is_not_seen_from_its_first_query_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="up to token 48, and it goes on at 49"):
        observe(make_observer("snapkv"), 49, SHAPE.num_prompt_tokens)


def test_a_window_method_asks_for_its_window_only() -> None:
    assert make_observer("snapkv").first_position == SHAPE.num_prompt_tokens - SHAPE.window
    assert make_observer("h2o").first_position == 0
