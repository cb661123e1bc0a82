"""What a scorer may read of one layer, and the signature that every scorer has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.scoring.value_norms import OutputProjection


@dataclass(frozen=True)
class ScoringInputs:
    """A prompt, or the part of it that is computed so far, as one layer's attention sees it.

    Attributes:
        query: Queries of its last tokens, `[num_queries, num_heads, head_size]`. For a scorer these
            are the ones it looks through: those of the observation window, or of the whole prompt.
        key: Keys, `[num_kv_heads, num_tokens, head_size]`; the last `num_queries` are the queries'.
        value: Values, `[num_kv_heads, n, head_size]`, of the tokens that compete, or of more.
        scale: Softmax scale, as the layer uses it.
        output_projection: The layer's W_O; None where the method needs no norms.
        sinks: Attention sinks, `[num_heads]`: a logit that every softmax of the query head has
            besides those of the keys (gpt-oss), or None.
        layer_index: The layer's place in the model.
        rotation: How queries and keys are rotated by position; the first key's is 0. None where
            the method does not ask, or the model does not rotate.
        probe: The layer's calibrated probe, `[num_features, num_kv_heads]`; see `probe.py`. None
            where the method does not ask.
        replayed: The most attention that KVzip's replay pays to each entry,
            `[num_kv_heads, num_tokens]`, or None; off the engine only.
        numbers: The scores that the first entries were given at an earlier cut, `[num_kv_heads,
            n]`, or None.
        first_position: Position in the request of the first entry that has no number; those behind
            it follow.
        num_absent: First columns of each head in which there is no entry, `[num_kv_heads]` int64:
            heads that retain different numbers of entries all end with the latest ones. What a
            scorer says of absent entries is ignored, and they must not change what it says of
            others. None where every head has an entry in every column.
        num_layers: More than 1 where the heads of so many layers from that one on stand side by
            side, as if they were one layer's.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    output_projection: OutputProjection | None = None
    sinks: torch.Tensor | None = None
    layer_index: int = 0
    rotation: Rotation | None = None
    probe: torch.Tensor | None = None
    replayed: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    first_position: int = 0
    num_absent: torch.Tensor | None = None
    num_layers: int = 1

    @property
    def is_absent(self) -> torch.Tensor | None:
        """Columns of each head in which there is no entry, `[num_kv_heads, num_tokens]` bool."""
        if self.num_absent is None:
            return None
        return absent_columns(self.num_absent, self.key.shape[1])

    @property
    def num_scored(self) -> int:
        """Tokens before the queries: those that window scorers score."""
        return self.key.shape[1] - self.query.shape[0]


def absent_columns(num_absent: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Marks the first columns of every head, as many as it lacks, `[..., num_columns]` bool."""
    return torch.arange(num_columns, device=num_absent.device) < num_absent[..., None]


Scorer = Callable[[ScoringInputs, EvictionConfig], torch.Tensor]
"""`(inputs, config)` -> importance of what comes before the window, the larger the better,
`[num_kv_heads, num_tokens - window]`."""


@cache
def scorer_named(name: str) -> Scorer:
    """The scorer that a name in the registry stands for, such as `snapkv:snapkv_scores`."""
    found: Scorer = resolve_name(f"vllm_kvselect.scoring.{name}")
    return found
