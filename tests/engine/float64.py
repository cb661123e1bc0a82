"""The published choice on the real model's tensors: float64, one head and one query at a time.

Shares no code with the package. What is not a loop over tokens comes from `tests.oracle`, where
these are too slow for real lengths.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tests import oracle
from tests.method_cases import MethodCase

WINDOW, BLOCK_SIZE, BUDGET = 32, 32, 160


class Layer(NamedTuple):
    """A prompt in one layer.

    Attributes:
        query: `[num_prompt_tokens, num_heads, head_size]`.
        key: `[num_prompt_tokens, num_kv_heads, head_size]`.
        value: `[num_prompt_tokens, num_kv_heads, head_size]`.
        projection: The checkpoint's W_O, `[hidden_size, num_heads * head_size]`.
        sinks: A logit that every row of a query head has besides the keys', `[num_heads]`, or None.
        theta: Base of the rotary embedding that turned queries and keys; None if nothing did.
        num_turned: Channels of a head that it turned, the first ones; None for all.
        probe: The calibrated probe, `[num_features, num_kv_heads]`.
        positions: Of the entries, `[n]`; None for a prompt's.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    projection: torch.Tensor
    sinks: torch.Tensor | None = None
    theta: float | None = 10_000.0
    num_turned: int | None = None
    probe: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]


class Expected(NamedTuple):
    """What a head should retain.

    Attributes:
        count: Its number of entries.
        keys: What they are ranked by in the end, `[num_tokens]`.
        scores: What stage 1 ranks by, `[num_tokens]`.
        first: How many entries stage 1 retains.
    """

    count: int
    keys: torch.Tensor
    scores: torch.Tensor
    first: int

    def check(self, actual: set[int]) -> None:
        """Only entries on a cut may differ: float32 scores are off by some 1e-6 relatively."""
        order = torch.sort(self.keys, descending=True, stable=True).indices
        for token in set(order[: self.count].tolist()) ^ actual:
            assert near(self.keys, self.count, token) or near(self.scores, self.first, token)


def near(values: torch.Tensor, rank: int, token: int) -> bool:
    """Whether a token's value is that of one of the two at the given rank, up to rounding."""
    cut = values.sort(descending=True).values[max(rank - 1, 0) : rank + 1]
    return bool(torch.isclose(values[token], cut, rtol=1e-4, atol=0).any())


def tail_begin(prompt_len: int) -> int:
    """First token of the tail."""
    return (prompt_len - WINDOW) // BLOCK_SIZE * BLOCK_SIZE


def num_packed(prompt_len: int) -> int:
    """Packed blocks of a prompt."""
    return -(-(BUDGET - (prompt_len - tail_begin(prompt_len))) // BLOCK_SIZE)


def expect(case: MethodCase, layers: Sequence[Layer], first_layer: int = 0) -> list[Expected]:
    """What every head of a pool of layers, or of one alone, should retain of a prompt."""
    config, base = case.config(), oracle.base_of(case.method)
    prompt_len = len(layers[0].query)
    even, num_tokens = num_packed(prompt_len) * BLOCK_SIZE, tail_begin(prompt_len)
    scores, products, stage_1 = [], [], []
    for index, layer in enumerate(layers):
        scores.append(stage_1_scores(base, layer, config, first_layer + index)[:, :num_tokens])
        weights = stage_2_scores(base, layer, config, first_layer + index)[:, :num_tokens]
        norms = value_norms(layer)[:, :num_tokens]
        if base == "defensivekv":
            rows_of_layer = scores[-1].tolist()
            stage_1 += [oracle.mass_stage(row, config.mass, even) for row in rows_of_layer]
            products.append(weights * norms / norms.sum(dim=0))
            for head, tokens in enumerate(stage_1[-len(norms) :]):
                products[-1][head, tokens] = 2 + scores[-1][head, tokens]
        else:
            products.append(multiplied(base, weights, norms, config))
    for each in (*scores, *products):
        each[:, : config.num_first] = torch.inf
    ranking = products if base in ("thetakv", "defensivekv") else scores
    packed = num_packed(prompt_len)
    counts = [BLOCK_SIZE * count for count in pages(case.method, ranking, config, packed)]
    expected = []
    for head, count in enumerate(counts):
        row, product = torch.cat(scores)[head], torch.cat(products)[head]
        if base == "defensivekv":
            expected.append(Expected(count, product, row, len(stage_1[head])))
        else:
            expected.append(chosen(case, count, row, product))
    return expected


def multiplied(base: str, weights: torch.Tensor, norms: torch.Tensor, config: Any) -> torch.Tensor:
    """What stage 2 ranks by."""
    if base == "thetakv":
        lam = config.lam
        return (weights + lam / weights.shape[-1]) / (1 + lam) * norms
    return (weights + config.eps) * norms


def chosen(case: MethodCase, count: int, scores: torch.Tensor, product: torch.Tensor) -> Expected:
    """What a head retains of its scores, products with norms, or first one and then the other."""
    config, base = case.config(), oracle.base_of(case.method)
    if base == "thetakv" or case.method.endswith("-perturb"):
        first = max(int(config.alpha * count), min(config.num_first, count))
        keys = product.clone()
        keys[torch.sort(scores, descending=True, stable=True).indices[:first]] = torch.inf
        return Expected(count, keys, scores, first)
    return Expected(count, scores, scores, count)


def pages(method: str, ranking: list[torch.Tensor], config: Any, packed: int) -> list[int]:
    """Pages of every head of every layer."""
    base = oracle.base_of(method)
    layers = [layer.tolist() for layer in ranking]
    least = -(-config.num_first // BLOCK_SIZE)
    heads = oracle.first_pages_first(
        [head for layer in layers for head in layer], least * BLOCK_SIZE
    )
    adaptive = (BLOCK_SIZE, config.safeguard, config.floor)
    if "pyramidkv" in base:
        num_blocks = len(heads[0]) // BLOCK_SIZE
        blocks = oracle.pyramid_blocks(packed, len(layers), num_blocks, config.beta, max(1, least))
        if base == "pyramidkv":
            return [count for count in blocks for _ in layers[0]]
        split = [
            oracle.adaptive_pages(
                oracle.first_pages_first(layer, least * BLOCK_SIZE), count, *adaptive
            )
            for layer, count in zip(layers, blocks, strict=True)
        ]
        return [count for counts in split for count in counts]
    if base == "defensivekv" or (base != "thetakv" and method.startswith("layer-")):
        return oracle.adaptive_pages(heads, packed, BLOCK_SIZE, 0.0)
    if base in ("adakv", "thetakv") or method.startswith("ada-"):
        return oracle.adaptive_pages(heads, packed, *adaptive)
    return [packed] * len(heads)


def value_norms(layer: Layer) -> torch.Tensor:
    """L1 norms, means over the group: `[num_kv_heads, num_prompt_tokens]`."""
    num_tokens, num_kv_heads, size = layer.value.shape
    norms = torch.zeros(num_kv_heads, num_tokens, dtype=torch.float64)
    for head in range(num_kv_heads * layer.group):
        columns = layer.projection[:, head * size : (head + 1) * size]
        projected = layer.value[:, head // layer.group] @ columns.T
        norms[head // layer.group] += projected.abs().sum(1) / layer.group
    return norms


def rows(layer: Layer, first: int) -> torch.Tensor:
    """Attention of the queries from `first` on: `[num_heads, num_queries, num_prompt_tokens]`."""
    num_tokens, num_heads, size = layer.query.shape
    weights = torch.zeros(num_heads, num_tokens - first, num_tokens, dtype=torch.float64)
    for head in range(num_heads):
        for position in range(first, num_tokens):
            keys = layer.key[: position + 1, head // layer.group]
            logits = keys @ layer.query[position, head] * size**-0.5
            if layer.sinks is not None:
                logits = torch.cat((logits, layer.sinks[head : head + 1]))
            weights[head, position - first, : position + 1] = torch.softmax(logits, 0)[
                : position + 1
            ]
    return weights


def stage_1_scores(base: str, layer: Layer, config: Any, index: int) -> torch.Tensor:
    """`[num_kv_heads, num_prompt_tokens - window]`."""
    num_scored, num_kv_heads = len(layer.query) - WINDOW, layer.key.shape[1]
    if base == "streaming-llm":
        return torch.arange(num_scored, dtype=torch.float64).repeat(num_kv_heads, 1)
    if base == "random":
        drawn = oracle.random_scores(config.seed, index, num_kv_heads, num_scored)
        return torch.tensor(drawn, dtype=torch.float64)
    if base == "keydiff":
        units = layer.key / layer.key.norm(dim=-1, keepdim=True)
        anchor = units.mean(0)
        cosines = (units * anchor).sum(-1) / anchor.norm(dim=-1)
        return 1 - cosines[:num_scored].T
    if base == "knorm":
        return 1 / (1 + layer.key[:num_scored].norm(dim=-1).T)
    if base == "probe":
        return probe_scores(layer)[:, :num_scored]
    if base == "r-kv":
        attended = pooled(attention_of_largest_logits(layer), config.kernel_size, config.pooling)
        repeated = redundancy(layer, config.r_kv_threshold)
        alone = repeated.amax(1, keepdim=True) - repeated
        return config.r_kv_lam * attended + (1 - config.r_kv_lam) * alone[:, :num_scored]
    by_member = (num_kv_heads, layer.group, -1, len(layer.query))
    window = rows(layer, num_scored).view(by_member).mean(2)[..., :num_scored]
    if base == "defensivekv":
        return window.mean(1)
    reduced = window.mean(1) if config.group_reduction == "mean" else window.amax(1)
    return pooled(reduced, config.kernel_size, config.pooling)


def attention_of_largest_logits(layer: Layer) -> torch.Tensor:
    """The window's mean attention by a group's largest logits, `[num_kv_heads, num_scored]`."""
    num_tokens, num_kv_heads, size = layer.key.shape
    num_scored = num_tokens - WINDOW
    attended = torch.zeros(num_kv_heads, num_scored, dtype=torch.float64)
    for kv_head in range(num_kv_heads):
        members = slice(kv_head * layer.group, (kv_head + 1) * layer.group)
        for position in range(num_scored, num_tokens):
            keys = layer.key[: position + 1, kv_head]
            logits = (keys @ layer.query[position, members].T * size**-0.5).amax(1)
            if layer.sinks is not None:
                logits = torch.cat((logits, layer.sinks[members].amax(0, keepdim=True)))
            attended[kv_head] += torch.softmax(logits, 0)[:num_scored] / WINDOW
    return attended


def redundancy(layer: Layer, threshold: float) -> torch.Tensor:
    """Likeness to all keys but, for each of them, the latest one like it: `[num_kv_heads, n]`."""
    repeated = []
    for keys in layer.key.unbind(1):
        units = keys / keys.norm(dim=-1, keepdim=True)
        cosines = units @ units.T
        cosines.fill_diagonal_(0)
        for row in cosines:
            alike = torch.nonzero(row > threshold)
            if len(alike):
                row[alike[-1]] = 0
        repeated.append(torch.softmax(cosines.mean(0), 0))
    return torch.stack(repeated)


def probe_scores(layer: Layer) -> torch.Tensor:
    """What a linear map says of each head's vectors, `[num_kv_heads, num_prompt_tokens]`."""
    assert layer.probe is not None
    num_tokens, num_kv_heads, size = layer.key.shape
    num_turned = layer.num_turned or size
    angles = angles_of(layer, num_turned)
    positions = positions_of(layer)
    back = -positions[:, None] * angles
    turn = torch.polar(torch.ones_like(back), back)
    scores = torch.zeros(num_kv_heads, num_tokens, dtype=torch.float64)
    for head in range(num_kv_heads):
        key = layer.key[:, head]
        before = unpaired(paired(key[:, :num_turned]) * turn), key[:, num_turned:]
        features = *before, layer.value[:, head], torch.ones(num_tokens, 1, dtype=torch.float64)
        scores[head] = torch.cat(features, dim=1) @ layer.probe[:, head].double()
    # Of equal tokens, which the first layer cannot tell apart, the later one.
    return (scores + positions / 2**18).exp()


def angles_of(layer: Layer, size: int) -> torch.Tensor:
    """By how much each pair of channels turns from one position to the next, `[size / 2]`."""
    if layer.theta is None:
        return torch.zeros(size // 2, dtype=torch.float64)
    return layer.theta ** (-torch.arange(size // 2, dtype=torch.float64) / (size // 2))


def positions_of(layer: Layer) -> torch.Tensor:
    """Positions of its entries, `[n]`."""
    return torch.arange(len(layer.key)) if layer.positions is None else layer.positions


def paired(vectors: torch.Tensor) -> torch.Tensor:
    """Channel `i` and channel `i + size / 2` as one complex number."""
    half = vectors.shape[-1] // 2
    return torch.complex(vectors[..., :half].contiguous(), vectors[..., half:].contiguous())


def unpaired(numbers: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def stage_2_scores(base: str, layer: Layer, config: Any, index: int) -> torch.Tensor:
    """What the norms are multiplied by."""
    if config.stage_2_scores == "unpooled":
        config = config.model_copy(update={"kernel_size": 1})
    if base != "defensivekv":
        return stage_1_scores(base, layer, config, index)
    num_scored, num_kv_heads = len(layer.query) - WINDOW, layer.key.shape[1]
    window = rows(layer, num_scored)[..., :num_scored]
    each = pooled(window, config.kernel_size, config.pooling)
    if config.pooling == "mean":
        each *= window.sum(-1, keepdim=True) / each.sum(-1, keepdim=True)
    worst = each.view(num_kv_heads, -1, num_scored).amax(1)
    return torch.maximum(worst, worst.mean(-1, keepdim=True))


def pooled(scores: torch.Tensor, kernel_size: int, pooling: str) -> torch.Tensor:
    """Maximum or mean over neighbours, token by token."""
    half, columns = kernel_size // 2, []
    for token in range(scores.shape[-1]):
        neighbours = scores[..., max(0, token - half) : token + half + 1]
        columns.append(
            neighbours.amax(-1) if pooling == "max" else neighbours.sum(-1) / kernel_size
        )
    return torch.stack(columns, dim=-1)
