"""The whole choice, for the layers that share a request's packed pages; one alone is a pool too."""

from collections.abc import Sequence
from itertools import chain
from math import ceil, fsum, inf
from typing import NamedTuple

from tests.oracle.allocation import (
    adaptive_pages,
    first_pages_first,
    first_tokens_first,
    pyramid_blocks,
)
from tests.oracle.scores import (
    defensive_scores,
    expected_attention,
    expected_attention_scores,
    h2o_scores,
    keydiff_scores,
    knorm_scores,
    probe_scores,
    r_kv_scores,
    random_scores,
    snapkv_scores,
    value_l2_norms,
    value_norms,
)
from tests.oracle.selection import mass_stage, select, select_two_stages
from tests.oracle.types import Cube, Matrix, Vector
from vllm_kvselect.config import EvictionConfig

QUERY_AGNOSTIC = ("knorm", "keydiff", "expected-attention", "probe", "kvzip")


class LayerInputs(NamedTuple):
    """Tensors of one layer; `query` is the window's, or, where it is needed, the whole prompt's.

    `frequencies` are the angles by which positions rotate pairs of channels, if they do, and
    `probe[feature][kv_head]` is the layer's probe, `replayed[kv_head][token]` what a replay paid,
    `numbers[kv_head][token]` what all queries so far paid, or what the probe said when the token
    first competed, where that is not asked of `query` and of places.
    """

    query: Cube
    key: Cube
    value: Cube
    output_projection: Sequence[Cube]
    sinks: Vector | None = None
    frequencies: Vector = ()
    probe: Matrix = ()
    replayed: Matrix = ()
    numbers: Matrix = ()


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
    base, num_tokens = base_of(config.method), len(layers[0].value[0])
    scores: list[Matrix] = []
    products: list[Matrix] = []
    for index, layer in enumerate(layers, first_layer):
        of_layer = base, layer, scale, config, index
        scores.append([row[:num_tokens] for row in stage_1_scores(*of_layer)])
        if has_products(base, config):
            weights, even = stage_2_scores(*of_layer), num_packed * block_size
            products.append(multiplied(base, scores[-1], weights, layer, even, config))
    return chosen(base, scores, products, num_packed, block_size, config, config.floor)


def retain_uneven(
    layers: Sequence[Sequence[LayerInputs]],
    num_tokens: int,
    scale: float,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    first_layer: int = 0,
) -> Retained:
    """The same for heads that hold different numbers of entries, all up to the latest ones.

    `layers[layer][head]` is a head alone. Its tokens are counted so that those of all heads end
    at `num_tokens`; where a head has none, it scores minus infinity.
    """
    base = base_of(config.method)
    scores: list[Matrix] = []
    products: list[Matrix] = []
    for index, heads in enumerate(layers, first_layer):
        rows, multiples = [], []
        for place, head in enumerate(heads):
            competing = len(head.value[0])
            nothing = [-inf] * (num_tokens - competing)
            row = stage_1_scores(base, head, scale, config, index)[0][:competing]
            if base == "random":  # the only rule to which it matters which head it is
                row = random_scores(config.seed, index, place + 1, competing)[place]
            rows.append([*nothing, *row])
            if has_products(base, config):
                weights = stage_2_scores(base, head, scale, config, index)
                (multiple,) = multiplied(base, [row], weights, head, 0, config)
                multiples.append([*nothing, *multiple])
        scores.append(rows)
        products += [multiples] if multiples else []
    return chosen(base, scores, products, num_packed, block_size, config, "minimum")


def has_products(base: str, config: EvictionConfig) -> bool:
    """Whether norms of values have a part in the choice."""
    return config.method.endswith("-perturb") or base in ("thetakv", "defensivekv")


def chosen(
    base: str,
    scores: Sequence[Matrix],
    products: Sequence[Matrix],
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    floor: str,
) -> Retained:
    """What is retained of layers, `[layer][head][token]`, by scores, by products, or by both."""
    num_heads, num_tokens = len(scores[0]), len(scores[0][0])
    one_stage = base == "defensivekv" or base in QUERY_AGNOSTIC
    scores, products = (
        [first_tokens_first(layer, config.num_first) for layer in each]
        for each in (scores, products)
    )
    ranking = products if products and (base == "thetakv" or one_stage) else scores
    least = ceil(config.num_first / block_size)

    if "pyramidkv" in base:
        shape = (num_packed, len(scores), num_tokens // block_size)
        blocks = pyramid_blocks(*shape, config.beta, max(1, least))
    if base == "pyramidkv":
        pages = [count for count in blocks for _ in range(num_heads)]
    elif base == "ada-pyramidkv":
        pages = []
        for layer_ranking, count in zip(ranking, blocks, strict=True):
            raised = first_pages_first(layer_ranking, min(least, count) * block_size)
            pages += adaptive_pages(raised, count, block_size, config.safeguard, floor)
    else:
        of_first = min(least, num_packed) * block_size
        heads = first_pages_first(list(chain.from_iterable(ranking)), of_first)
        is_ada = base in QUERY_AGNOSTIC and config.method.startswith("ada-")
        if base in ("adakv", "thetakv") or is_ada:
            pages = adaptive_pages(heads, num_packed, block_size, config.safeguard, floor)
        elif base == "defensivekv" or config.method.startswith("layer-"):
            pages = adaptive_pages(heads, num_packed, block_size, safeguard=0.0)
        else:
            pages = [num_packed] * len(heads)

    budgets = [block_size * count for count in pages]
    flat_scores = list(chain.from_iterable(scores))
    if not products:
        return Retained(select(flat_scores, budgets), pages)
    flat_products = list(chain.from_iterable(products))
    if one_stage:
        return Retained(select(flat_products, budgets), pages)
    stages = (budgets, config.alpha, config.num_first)
    return Retained(select_two_stages(flat_scores, flat_products, *stages), pages)


def base_of(method: str) -> str:
    """The method whose scores another form of it shares."""
    base = method.removesuffix("-perturb").removeprefix("layer-")
    return of_head if (of_head := base.removeprefix("ada-")) in QUERY_AGNOSTIC else base


def stage_1_scores(
    base: str, layer: LayerInputs, scale: float, config: EvictionConfig, index: int
) -> Matrix:
    """What entries are ranked by, the first stage's where there are two."""
    query, key, sinks = layer.query, layer.key, layer.sinks
    num_scored = len(key[0]) - config.window
    if base == "streaming-llm":
        return [list(range(num_scored))] * len(key)
    if base == "random":
        return random_scores(config.seed, index, len(key), num_scored)
    if base == "probe" and layer.numbers:
        return [row[:num_scored] for row in layer.numbers]
    if base == "h2o":
        return h2o_scores(query, key, scale, config.window, sinks)
    if base == "keydiff":
        return keydiff_scores(key, config.window)
    if base == "knorm":
        return knorm_scores(key, config.window)
    if base == "expected-attention":
        future = (config.num_first, config.future, layer.frequencies)
        attention = expected_attention(query, key, scale, *future, sinks)
        options = (config.window, config.expected_eps)
        of_values = not config.method.endswith("-perturb")
        return expected_attention_scores(attention, layer.value, *options, of_values)
    if base == "probe":
        of_tokens = (key, layer.value, layer.probe, layer.frequencies)
        return probe_scores(*of_tokens, config.window)
    if base == "kvzip":
        return [row[:num_scored] for row in layer.replayed]
    if base == "defensivekv":
        return snapkv_scores(query, key, scale, 1, sinks=sinks)
    if base == "r-kv":
        pooling = (config.kernel_size, config.pooling)
        weights = (config.r_kv_lam, config.r_kv_threshold)
        return r_kv_scores(query, key, scale, *pooling, *weights, sinks)
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
    norms_of = value_l2_norms if base in QUERY_AGNOSTIC else value_norms
    norms = norms_of(layer.value, layer.output_projection)
    num_heads, num_tokens = len(norms), len(norms[0])
    products: list[list[float]] = []
    for head in range(num_heads):
        first = mass_stage(scores[head], config.mass, even) if base == "defensivekv" else []
        products.append([])
        for token in range(num_tokens):
            weight, norm = weights[head][token], norms[head][token]
            if base in QUERY_AGNOSTIC:
                product = weight * norm / (fsum(chain(*norms)) / (num_heads * num_tokens))
            elif base == "thetakv":
                product = (weight + config.lam / num_tokens) / (1 + config.lam) * norm
            elif base != "defensivekv":
                product = (weight + config.eps) * norm
            elif token in first:
                product = 2 + scores[head][token]
            else:
                product = weight * (norm / sum(norms[h][token] for h in range(num_heads)))
            products[-1].append(product)
    return products
