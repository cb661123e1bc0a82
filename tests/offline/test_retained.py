import pytest
import torch

from tests import oracle
from tests.strategies import random_probe
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.offline.retained import Prompt, retained_entries, tail_entries
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.registry import KNOWN_METHODS
from vllm_kvselect.scoring.value_norms import OutputProjection

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_SIZE = 2, 2, 2, 8
NUM_PROMPT_TOKENS, NUM_FOLLOWING, WINDOW = 80, 16, 8


def make_layer(seed: int) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_tokens = NUM_PROMPT_TOKENS + NUM_FOLLOWING
    return Layer(
        query=draw(num_tokens, NUM_KV_HEADS * GROUP, HEAD_SIZE),
        key=draw(NUM_KV_HEADS, num_tokens, HEAD_SIZE),
        value=draw(NUM_KV_HEADS, num_tokens, HEAD_SIZE),
        scale=0.5,
        projection=OutputProjection.of(draw(NUM_KV_HEADS, HEAD_SIZE, GROUP, 12)),
    )


LAYERS = [make_layer(seed) for seed in range(NUM_LAYERS)]
REPLAYED = torch.rand(
    NUM_LAYERS, NUM_KV_HEADS, NUM_PROMPT_TOKENS, generator=torch.Generator().manual_seed(9)
)
PROBE = torch.stack([random_probe(NUM_KV_HEADS, HEAD_SIZE, seed) for seed in (7, 8)])


def make_prompt(block_size: int = 1, equal_norms: bool = False) -> Prompt:
    layers = LAYERS
    if equal_norms:
        layers = [layer._replace(value=torch.ones_like(layer.value)) for layer in layers]
    return Prompt(layers, NUM_PROMPT_TOKENS, block_size, probe=PROBE, replayed=REPLAYED)


def make_config(method: str, **values: object) -> EvictionConfig:
    return EvictionConfig.parse({"method": method, "budget": 0.3, "window": WINDOW, **values})


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("method", KNOWN_METHODS)
def test_retained_entries_equal_the_oracle(method: str, block_size: int) -> None:
    config = make_config(method)
    (cut,) = cuts(NUM_PROMPT_TOKENS, block_size, config)
    retained = retained_entries(make_prompt(block_size), config)
    scored = cut.tail_start * block_size
    pool = range(NUM_LAYERS) if KNOWN_METHODS[method].pooled else None
    for layers in [pool] if pool else [[index] for index in range(NUM_LAYERS)]:
        expected = oracle.retain(
            [oracle_inputs(index, scored, config) for index in layers],
            LAYERS[0].scale,
            cut.num_packed,
            block_size,
            config,
            layers[0],
        )
        chosen = retained[list(layers), :, :scored].flatten(0, 1)
        found = [tuple(entry) for entry in chosen.nonzero().tolist()]
        assert found == sorted(expected.entries)
    assert retained[:, :, scored:].all()


def oracle_inputs(index: int, scored: int, config: EvictionConfig) -> oracle.LayerInputs:
    layer = LAYERS[index]
    first = 0 if KNOWN_METHODS[config.method].scorer.whole_prompt else NUM_PROMPT_TOKENS - WINDOW
    return oracle.LayerInputs(
        layer.query[first:NUM_PROMPT_TOKENS].tolist(),
        layer.key[:, :NUM_PROMPT_TOKENS].tolist(),
        layer.value[:, :scored].tolist(),
        layer.output_projection.weight.tolist(),
        probe=PROBE[index].tolist(),
        replayed=REPLAYED[index].tolist(),
    )


def test_budget_above_the_prompt_drops_nothing() -> None:
    config = make_config("adakv-perturb", budget=NUM_PROMPT_TOKENS)
    assert retained_entries(make_prompt(), config).all()
    assert tail_entries(make_prompt(), config).all()
