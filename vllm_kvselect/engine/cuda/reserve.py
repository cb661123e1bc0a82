"""What the choices of a step take beside the KV cache, by method; tested against what they do."""

from collections.abc import Iterable

import torch

from vllm_kvselect.engine.drop.due import LEAST_COLUMNS, MOST_NUMBERS
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.paging.compaction import MOST_BYTES
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.blocks import block_elements

_NUMBERS = {"score": 7, "bound": 11, "defence": 19}
"""Numbers of four bytes for each entry, by what allocation counts."""
_NUMBERS_OF_PRUNING = 6
"""What the search for the norms that matter adds."""
_ROW_BY_ROW = {"streaming_llm": 0, "at_random": 0, "knorm": 0, "r_kv": 3}
"""Scorers that read a layer's keys and values, and copies in float32 that each makes of keys."""
_BLOCKS = {"r_kv": 3}
"""Blocks of a square that a scorer holds at once."""


def choice_bytes(
    methods: Iterable[str],
    spec: HeadwiseSpec,
    num_layers: int,
    num_tokens: int,
    group: int,
    window: int,
    dtype: torch.dtype,
    num_requests: int = 1,
) -> int:
    """Bytes that the cuts of a step take, whichever of the methods their requests have.

    All layers of the requests of a pass are chosen from at once, so numbers are of all their
    entries. What is moved is copied in parts. `num_tokens` are those of the longest prompt, `group`
    the query heads of a KV head, `num_requests` as many as may be due at once.
    """
    of_layer = spec.num_kv_heads * num_tokens
    longest = num_layers * of_layer
    entries = max(longest, min(MOST_NUMBERS, num_requests * longest))
    per_column = num_layers * spec.num_kv_heads
    together = min(num_requests, max(1, MOST_NUMBERS // (LEAST_COLUMNS * per_column)))
    queries = together * per_column * group * window
    most = 0
    for name in methods:
        method = METHODS[name]
        scorer = (method.weights or method.scores).partition(":")[0]
        norms = method.norms
        is_pruned = norms.two_stages and norms.ranking == "score" and not method.pooled
        num_bytes = 4 * (_NUMBERS[norms.ranking] + _NUMBERS_OF_PRUNING * is_pruned) * entries
        if (copies := _ROW_BY_ROW.get(scorer)) is not None:
            read = 2 * spec.head_size * (dtype.itemsize + 2 * copies)
            num_bytes += read * of_layer + 4 * _BLOCKS.get(scorer, 0) * block_elements(
                torch.device("cuda")
            )
        most = max(most, num_bytes)
    return most + MOST_BYTES + queries * spec.head_size * dtype.itemsize
