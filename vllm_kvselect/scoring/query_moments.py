"""Mean and covariance of queries, added up chunk by chunk."""

from dataclasses import dataclass
from typing import Self

import torch


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
