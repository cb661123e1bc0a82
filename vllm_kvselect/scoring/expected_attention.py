"""Expected Attention (arXiv 2510.00636): what later queries will attend to, if they are alike.

The prompt's queries, as they were before their positions, are taken for a sample of a normal
distribution. Rotated by the positions that come next, its mean and covariance give the attention
that a key can expect in closed form.
"""

from dataclasses import dataclass
from typing import Self

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scorers import Expectation
from vllm_kvselect.scoring.inputs import ScoringInputs

_BLOCK_ELEMENTS = 2**22
"""Numbers alive at once, of queries or of products with keys: 16 MiB in float32."""


@dataclass(frozen=True)
class QueryMoments:
    """What is remembered of many queries, by head.

    Kept around the mean instead of as sums of products: queries have means many times their spread,
    and the difference of two large sums would lose the covariance to rounding.

    Attributes:
        count: How many queries.
        mean: `[num_heads, head_size]`.
        scatter: Sum of the outer products of what the queries differ from their mean,
            `[num_heads, head_size, head_size]`.
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor) -> Self:
        """Those of queries, `[num_heads, num_queries, head_size]`, at least one."""
        mean = query.mean(dim=1, keepdim=True)
        deviations = query - mean
        return cls(query.shape[1], mean.squeeze(1), deviations.transpose(1, 2) @ deviations)

    def merged(self, other: Self) -> Self:
        """Those of both sets together (Chan, Golub and LeVeque, 1983)."""
        count = self.count + other.count
        share, apart = other.count / count, other.mean - self.mean
        between = apart[:, :, None] * apart[:, None, :] * (self.count * share)
        return type(self)(count, self.mean + apart * share, self.scatter + other.scatter + between)

    @property
    def covariance(self) -> torch.Tensor:
        """`[num_heads, head_size, head_size]`, divided by the number of queries."""
        return self.scatter / self.count


def expected_attention_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores entries by `(attention + expected_eps) * norm of the value`.

    Keys and queries are those of the whole prompt.

    Returns:
        `[num_kv_heads, n]` for those of the tokens before the window that values cover, at least
        float32.
    """
    weights = expected_weights(inputs, config)
    value = inputs.value[:, : weights.shape[1]]
    norms: torch.Tensor = torch.linalg.vector_norm(value, dim=-1, dtype=weights.dtype)
    return weights * norms


def expected_weights(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores as above without the norm of the value, for methods that take another norm."""
    num_tokens = min(inputs.key.shape[1] - config.window, inputs.value.shape[1])
    expected = expected_attention(inputs, config)[:, :num_tokens]
    return expected + config.of(Expectation).expected_eps


def expected_attention(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Attention that a later query pays to every key, in expectation.

    For `q ~ N(mu, Sigma)` a key's `E[exp(scale * q k)]` is `exp(scale * mu k + scale^2 * k Sigma k
    / 2)`. Softmax over the keys after the first `num_first`, mean over the query group.

    Returns:
        `[num_kv_heads, num_tokens]`, 0 for the first `num_first`: rows sum to 1, or to what the
        model's own attention sinks leave of it.
    """
    num_kv_heads, num_tokens, head_size = inputs.key.shape
    num_first = config.num_first
    mean, covariance = _of_later_queries(_moments(inputs, config), inputs, config)
    logits = _log_expectations(
        inputs.key[:, num_first:],
        (inputs.scale * mean).view(num_kv_heads, -1, head_size),
        (inputs.scale**2 / 2 * covariance).view(num_kv_heads, -1, head_size, head_size),
    )
    if inputs.sinks is not None:
        of_heads = inputs.sinks.to(logits.dtype).view(num_kv_heads, -1, 1)
        logits = torch.cat((logits, of_heads), dim=-1)
    attention = logits.softmax(dim=-1).mean(dim=1)
    scores = attention.new_zeros(num_kv_heads, num_tokens)
    num_keys = num_tokens - num_first
    scores[:, num_first:] = attention[:, : max(num_keys, 0)]
    return scores


def _moments(inputs: ScoringInputs, config: EvictionConfig) -> QueryMoments:
    """Moments of the queries before their rotation, in blocks.

    The first `num_first` are outliers and do not count, but the last of all always does.
    """
    num_queries = len(inputs.query)
    skipped = min(config.num_first, num_queries - 1)
    step, moments = max(1, _BLOCK_ELEMENTS // inputs.query[0].numel()), None
    for start in range(skipped, num_queries, step):
        query = inputs.query[start : start + step].transpose(0, 1)
        query = query.to(torch.promote_types(query.dtype, torch.float32))
        if inputs.rotation is not None:
            query = inputs.rotation.undo(query, start)
        added = QueryMoments.of(query)
        moments = moments.merged(added) if moments else added
    assert moments is not None
    return moments


def _of_later_queries(
    moments: QueryMoments, inputs: ScoringInputs, config: EvictionConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance, turned by the mean rotation of the next `future` positions."""
    mean, covariance = moments.mean, moments.covariance
    if inputs.rotation is None:
        return mean, covariance
    later = inputs.rotation.mean(inputs.key.shape[1], config.of(Expectation).future)
    # R C R^T, by rows and then by columns, which are rows too: C is symmetric.
    by_rows = later.apply(covariance)
    return later.apply(mean[:, None]).squeeze(1), later.apply(by_rows.transpose(1, 2))


def _log_expectations(
    key: torch.Tensor, linear: torch.Tensor, quadratic: torch.Tensor
) -> torch.Tensor:
    """`linear k + k quadratic k` of every key and query head, blocked over the keys.

    Args:
        key: `[num_kv_heads, num_keys, head_size]`.
        linear: `[num_kv_heads, group, head_size]`.
        quadratic: `[num_kv_heads, group, head_size, head_size]`.

    Returns:
        `[num_kv_heads, group, num_keys]`.
    """
    found = linear.new_empty(*linear.shape[:2], key.shape[1])
    step = max(1, _BLOCK_ELEMENTS // linear.numel())
    for start in range(0, key.shape[1], step):
        some = key[:, None, start : start + step].to(linear.dtype)
        products = (some @ quadratic).add_(linear[:, :, None]).mul_(some)
        found[:, :, start : start + step] = products.sum(dim=-1)
    return found
