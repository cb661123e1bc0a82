"""Segments: which tokens of a prompt are prefilled sparsely.

Scheduler and workers compute them independently from lengths and the configuration, as they do with
cuts. Segments lie at multiples of their size, wherever chunks end, so the blocks that a token reads
never depend on how the prompt was cut into chunks.
"""

from dataclasses import dataclass

from vllm_kvselect.config import EvictionConfig, Prefill
from vllm_kvselect.planning.cuts import Cuts


@dataclass(frozen=True, slots=True)
class Segments:
    """The sparse segments of a prompt; every other token attends to all tokens before it.

    They have `size` tokens each, from `start` up to `end`, both borders of segments.
    """

    size: int
    start: int
    end: int

    def last_border(self, position: int) -> int:
        """The last position up to `position` at which a chunk may end.

        The blocks of a segment are chosen by all of its queries. So it is computed in one step.
        """
        if self.start < position < self.end:
            return position // self.size * self.size
        return position

    def sparse_part(self, begin: int, end: int) -> range:
        """First positions of the segments that are computed with the tokens `begin .. end`.

        Raises:
            ValueError: If these tokens begin or end inside a sparse segment.
        """
        if self.last_border(begin) != begin or self.last_border(end) != end:
            raise ValueError(f"tokens {begin} to {end} begin or end inside a segment of {self}")
        return range(max(begin, self.start), min(end, self.end), self.size)


def sparse_segments(
    num_prompt_tokens: int, request_cuts: Cuts, config: EvictionConfig
) -> Segments | None:
    """Computes which segments of a prompt are sparse; None where all of them are dense.

    Dense are the segments that begin before `prefill_dense_until`, those that would read all blocks
    before them anyway, and those that hold one of the last `window` tokens of the prompt, or of its
    marked context: these ask what the prompt is about, and score its entries.
    """
    sparse = config.of(Prefill)
    if sparse.prefill == "dense":
        return None
    size, num_tokens = sparse.prefill_segment, num_prompt_tokens
    if request_cuts:
        num_tokens = min(num_tokens, request_cuts.first_position)
    start = -(-max(sparse.prefill_dense_until, sparse.prefill_budget + 1) // size) * size
    end = max(0, num_tokens - config.window) // size * size
    return Segments(size, start, end) if start < end else None
