"""Hypothesis strategies: small shapes around every boundary, scores full of ties."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.scoring.value_norms import OutputProjection

BLOCK_SIZES = (4, 8, 16, 32)

few = settings(max_examples=15, deadline=None, derandomize=True)
"""For tests that are parametrized over methods or run the loops of the oracle several times."""
some = settings(max_examples=100, deadline=None, derandomize=True)
many = settings(max_examples=200, deadline=None, derandomize=True)

seeds = st.integers(0, 2**32 - 1)
kv_heads = st.integers(1, 4)
groups = st.integers(1, 4)
head_sizes = st.sampled_from((8, 16, 24))
block_sizes = st.sampled_from(BLOCK_SIZES)
windows = st.integers(1, 12)


@dataclass(frozen=True)
class Shape:
    """Shape of one layer's prompt and of what is retained of it.

    Attributes:
        num_kv_heads: KV heads.
        group: Query heads per KV head.
        head_size: Channels per head.
        block_size: Tokens per block.
        window: Observation window.
        num_prompt_tokens: Prompt length.
        num_packed: Packed blocks, 1 to `tail_start - 1`.
    """

    num_kv_heads: int
    group: int
    head_size: int
    block_size: int
    window: int
    num_prompt_tokens: int
    num_packed: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group

    @property
    def tail_start(self) -> int:
        """Index of the first tail block."""
        return (self.num_prompt_tokens - self.window) // self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens before the tail: those that compete."""
        return self.tail_start * self.block_size

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.head_size**-0.5)


@st.composite
def prompt_lengths(draw: st.DrawFn, block_size: int, window: int, budget: int) -> int:
    """Prompt lengths at and next to every border: block multiples, the window, the budget."""
    border = draw(st.sampled_from((0, window, budget, budget + window, budget + block_size)))
    multiple = draw(st.integers(0, 8)) * block_size
    return max(1, border + multiple + draw(st.integers(-1, 1)))


@st.composite
def shapes(draw: st.DrawFn, max_tokens: int = 96) -> Shape:
    """Shapes with something to drop, `num_prompt_tokens - window` next to block multiples."""
    block_size = draw(block_sizes)
    window = draw(windows)
    tail_start = draw(st.integers(2, max(3, min(8, max_tokens // block_size))))
    beyond = draw(st.sampled_from((block_size - 1, 0, 1)))
    return Shape(
        num_kv_heads=draw(kv_heads),
        group=draw(groups),
        head_size=draw(head_sizes),
        block_size=block_size,
        window=window,
        num_prompt_tokens=tail_start * block_size + beyond + window,
        num_packed=draw(st.integers(1, tail_start - 1)),
    )


@st.composite
def tied_scores(draw: st.DrawFn, num_heads: int, num_tokens: int) -> list[list[int]]:
    """Integer scores, not negative: all zero, constant, a few values, one rich head, distinct."""
    kind = draw(st.sampled_from(("zero", "constant", "few", "rich head", "distinct", "wide")))
    random = draw(st.randoms(use_true_random=False, note_method_calls=False))
    if kind in ("zero", "constant"):
        return [[3 * (kind == "constant")] * num_tokens for _ in range(num_heads)]
    if kind == "distinct":
        values = random.sample(range(num_heads * num_tokens), num_heads * num_tokens)
        return [values[head * num_tokens :][:num_tokens] for head in range(num_heads)]
    high = {"few": 2, "rich head": 3, "wide": 2**20}[kind]
    scores = [[random.randint(0, high) for _ in range(num_tokens)] for _ in range(num_heads)]
    if kind == "rich head":
        rich = random.randrange(num_heads)
        scores[rich] = [score + 2 for score in scores[rich]]
    return scores


@dataclass(frozen=True)
class Layer:
    """Random inputs of one layer.

    Attributes:
        query: `[window, num_heads, head_size]`.
        key: `[num_kv_heads, num_prompt_tokens, head_size]`.
        value: `[num_kv_heads, num_prompt_tokens, head_size]`, the tail included.
        output_projection: `[num_kv_heads, head_size, group, hidden_size]`.
        prompt_query: Queries of the whole prompt, `[num_prompt_tokens, num_heads, head_size]`.
        sinks: Attention sinks, `[num_heads]`, or None.
        probe: `[num_features, num_kv_heads]`, float32.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output_projection: torch.Tensor
    prompt_query: torch.Tensor
    sinks: torch.Tensor | None
    probe: torch.Tensor


def random_layer(
    shape: Shape,
    seed: int,
    dtype: torch.dtype = torch.float64,
    hidden_size: int = 12,
    with_sinks: bool = False,
) -> Layer:
    """Draws the inputs; heads differ in how sharply they attend, so that budgets differ.

    Sinks, where there are some, take from next to nothing to most of a query head's attention.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    sharpness = 4.0 * torch.rand(shape.num_kv_heads, 1, 1, generator=generator, dtype=torch.float64)
    key = normal(shape.num_kv_heads, shape.num_prompt_tokens, shape.head_size) * sharpness
    projection = normal(shape.num_kv_heads, shape.head_size, shape.group, hidden_size)
    query = normal(shape.window, shape.num_heads, shape.head_size)
    value = normal(shape.num_kv_heads, shape.num_prompt_tokens, shape.head_size)
    earlier = normal(shape.num_prompt_tokens - shape.window, shape.num_heads, shape.head_size)
    return Layer(
        query=query.to(dtype),
        key=key.to(dtype),
        value=value.to(dtype),
        output_projection=projection.to(dtype),
        prompt_query=torch.cat([earlier, query]).to(dtype),
        sinks=(3 + 2 * normal(shape.num_heads)).to(dtype) if with_sinks else None,
        probe=random_probe(shape.num_kv_heads, shape.head_size, seed),
    )


def random_probe(num_kv_heads: int, head_size: int, seed: int) -> torch.Tensor:
    """Draws a probe whose heads do not agree on how much their entries matter."""
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(2 * head_size + 1, num_kv_heads, generator=generator)


def frequencies(head_size: int) -> list[float]:
    """Angles by which a position rotates the pairs of a head's channels, all but the last two."""
    return [100.0 ** (-pair / head_size) for pair in range(head_size // 2 - 1)]


def rotation(head_size: int, num_positions: int = 1024) -> Rotation:
    """Those angles as tables."""
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(frequencies(head_size), dtype=torch.float64)
    return Rotation(angles.cos(), angles.sin())


def scoring_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float = 1.0,
    value: torch.Tensor | None = None,
    projection: OutputProjection | None = None,
    sinks: torch.Tensor | None = None,
    layer_index: int = 0,
    rotated_by: Rotation | None = None,
    probe: torch.Tensor | None = None,
) -> ScoringInputs:
    """What a scorer reads; without values, keys stand in for them."""
    value = key if value is None else value
    given = (query, key, value, scale, projection, sinks, layer_index, rotated_by)
    return ScoringInputs(*given, probe=probe)
