"""The whole choice, for the layers that share a request's packed pages; one alone is a pool too."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from tests.oracle.allocation import adaptive_pages, pyramid_blocks
from tests.oracle.scores import (
    defensive_scores,
    h2o_scores,
    keydiff_scores,
    random_scores,
    snapkv_scores,
    streaming_llm_order,
    value_norms,
)
from tests.oracle.selection import mass_stage, select, select_two_stages
from tests.oracle.types import Cube, Matrix, Vector
from vllm_kvselect.config import EvictionConfig


class LayerInputs(NamedTuple):
    """Tensors of one layer; `query` is the window's, for H2O the whole prompt's."""

    query: Cube
    key: Cube
    value: Cube
    output_projection: Sequence[Cube]
    sinks: Vector | None = None


class Retained(NamedTuple):
    """What is retained of a prompt before the tail, and each head's pages; heads layer by layer."""

    entries: list[tuple[int, int]]
    pages: list[int]


def retain(
    layers: Sequence[LayerInputs],
    scale: float,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    first_layer: int = 0,
) -> Retained:
    """The choice of a pool of layers; only the tokens that `value` covers compete."""
    even, num_layers = num_packed * block_size, len(layers)
    num_heads, num_tokens = len(layers[0].value), len(layers[0].value[0])
    base = config.method.removesuffix("-perturb").removeprefix("layer-")
    scores = [
        [row[:num_tokens] for row in stage_1_scores(base, layer, scale, config, first_layer + i)]
        for i, layer in enumerate(layers)
    ]
    products: list[Matrix] = []
    if config.method.endswith("-perturb") or base in ("thetakv", "defensivekv"):
        for i, layer in enumerate(layers):
            weights = stage_2_scores(base, layer, scale, config, first_layer + i)
            weights = [row[:num_tokens] for row in weights]
            products.append(multiplied(base, scores[i], weights, layer, even, config))
    ranking = products if base in ("thetakv", "defensivekv") else scores

    if base == "pyramidkv":
        blocks = pyramid_blocks(num_packed, num_layers, num_tokens // block_size, config.beta)
        pages = [count for count in blocks for _ in range(num_heads)]
    elif base == "ada-pyramidkv":
        blocks = pyramid_blocks(num_packed, num_layers, num_tokens // block_size, config.beta)
        pages = []
        for layer_ranking, count in zip(ranking, blocks, strict=True):
            pages += adaptive_pages(
                layer_ranking, count, block_size, config.safeguard, config.floor
            )
    else:
        heads = list(chain.from_iterable(ranking))
        if base in ("adakv", "thetakv"):
            pages = adaptive_pages(heads, num_packed, block_size, config.safeguard, config.floor)
        elif base == "defensivekv":
            pages = adaptive_pages(heads, num_packed, block_size, safeguard=0.0)
        else:
            pages = [num_packed] * len(heads)

    budgets = [block_size * count for count in pages]
    flat_scores = list(chain.from_iterable(scores))
    if not products:
        return Retained(select(flat_scores, budgets), pages)
    flat_products = list(chain.from_iterable(products))
    if base == "defensivekv":
        return Retained(select(flat_products, budgets), pages)
    return Retained(select_two_stages(flat_scores, flat_products, budgets, config.alpha), pages)


def stage_1_scores(
    base: str, layer: LayerInputs, scale: float, config: EvictionConfig, index: int
) -> Matrix:
    """What entries are ranked by, the first stage's where there are two."""
    query, key, sinks = layer.query, layer.key, layer.sinks
    num_scored = len(key[0]) - config.window
    if base == "streaming-llm":
        order = streaming_llm_order(num_scored, config.num_sinks)
        return [[-order.index(token) for token in range(num_scored)]] * len(key)
    if base == "random":
        return random_scores(config.seed, index, len(key), num_scored)
    if base == "h2o":
        return h2o_scores(query, key, scale, config.window, sinks)
    if base == "keydiff":
        return keydiff_scores(key, config.window)
    if base == "defensivekv":
        return snapkv_scores(query, key, scale, 1, sinks=sinks)
    options = (config.kernel_size, config.pooling, config.group_reduction)
    return snapkv_scores(query, key, scale, *options, sinks)


def stage_2_scores(
    base: str, layer: LayerInputs, scale: float, config: EvictionConfig, index: int
) -> Matrix:
    """What the norms are multiplied by."""
    if config.stage_2_scores == "unpooled":
        config = EvictionConfig(**{**config.model_dump(), "kernel_size": 1})
    if base == "defensivekv":
        pooling = (config.kernel_size, config.pooling)
        return defensive_scores(layer.query, layer.key, scale, *pooling, layer.sinks)
    return stage_1_scores(base, layer, scale, config, index)


def multiplied(
    base: str,
    scores: Matrix,
    weights: Matrix,
    layer: LayerInputs,
    even: int,
    config: EvictionConfig,
) -> Matrix:
    """Products with the norms; for DefensiveKV the entries of stage 1 lie above all products."""
    norms = value_norms(layer.value, layer.output_projection)
    num_heads, num_tokens = len(norms), len(norms[0])
    products: list[list[float]] = []
    for head in range(num_heads):
        first = mass_stage(scores[head], config.mass, even) if base == "defensivekv" else []
        products.append([])
        for token in range(num_tokens):
            weight, norm = weights[head][token], norms[head][token]
            if base == "thetakv":
                product = (weight + config.lam / num_tokens) / (1 + config.lam) * norm
            elif base != "defensivekv":
                product = (weight + config.eps) * norm
            elif token in first:
                product = 2 + scores[head][token]
            else:
                product = weight * (norm / sum(norms[h][token] for h in range(num_heads)))
            products[-1].append(product)
    return products
