"""What the choice of a prompt takes beside the KV cache, by method; tested against what it does."""

from collections.abc import Iterable

import torch

from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.blocks import block_elements

_COPIES = {"keydiff": 2, "expected_attention": 2, "r_kv": 2}
"""Copies of all keys in float32 that a scorer holds at once."""
_COPIES_FOR_PRODUCTS = 3
"""The same of values, where a ranking multiplies by their norms."""
_BLOCKS = {"h2o": 3, "r_kv": 3}
"""Blocks of a square that a scorer holds at once."""
_ROWS = {"defensivekv": 2}
"""Copies of the window's attention, row by row."""


def choice_bytes(
    methods: Iterable[str],
    spec: HeadwiseSpec,
    num_layers: int,
    num_tokens: int,
    group: int,
    window: int,
    dtype: torch.dtype,
) -> int:
    """Bytes that the choice of the longest prompt takes, whichever of the methods it has.

    Its keys and values, read from the cache, about twelve numbers for each of its tokens and heads,
    more where layers wait for each other, and what scorers hold at once.

    Args:
        methods: Methods that requests may run with.
        spec: The cache of a layer.
        num_layers: Layers of the group.
        num_tokens: Tokens of the longest prompt.
        group: Query heads of a KV head.
        window: Tokens of the observation window.
        dtype: The model's.
    """
    entries = spec.num_kv_heads * num_tokens
    read = 2 * spec.head_size * (2 + dtype.itemsize)
    block = 4 * block_elements(torch.device("cuda"))
    most = 0
    for name in methods:
        method = METHODS[name]
        scorer = (method.weights or method.scores).partition(":")[0]
        products = _COPIES_FOR_PRODUCTS if method.ranking == "product" else 0
        copies = max(_COPIES.get(scorer, 0), products)
        numbers = 12 + copies * spec.head_size + _ROWS.get(scorer, 0) * group * window
        numbers += 4 * num_layers if method.pooled else 0
        most = max(most, 4 * numbers * entries + _BLOCKS.get(scorer, 0) * block)
    return read * entries + most
