"""Layers beside those that drop entries, in blocks of the same pool: whose they hold is seen."""

from collections.abc import Iterable

import numpy as np

from tests.engine.tagged_rows import Row, require


class TaggedBystander:
    """Layers that drop nothing: those of a sliding window, or of a state after each step.

    They write into the memory of the others, so that a block which two hold is seen by one of them.

    Args:
        cache: `[num_layers, num_kernel_blocks, num_kv_heads, page_size]`.
        per_block: Kernel blocks of a block.
        block_size: Tokens of a block of theirs.
        window: Tokens that a token sees; None for a state, which has seen all.
    """

    def __init__(
        self, cache: np.ndarray, per_block: int, block_size: int, window: int | None
    ) -> None:
        size = per_block * cache[0, 0].size
        self._blocks = cache.reshape(len(cache), -1, size)
        self._block_size, self._window = block_size, window
        self.num_read = 0

    def read_states(self, rows: Iterable[Row]) -> None:
        """Before a step: what the last token of each request left is where it goes on."""
        for row in rows:
            if self._window is None and row.num_computed:
                self._compare(row, row.num_computed - 1, slice(None))

    def write(self, rows: Iterable[Row]) -> None:
        """A step writes the state after its last token, or each of its tokens."""
        for row in rows:
            first = row.seq_len - 1 if self._window is None else row.num_computed
            for position in range(first, row.seq_len):
                block_id = row.beside[position // self._block_size]
                require(block_id, row.request_id, "writes beside to the null block")
                cell = slice(None) if self._window is None else position % self._block_size
                self._blocks[:, block_id, cell] = -int(row.tags[position])

    def read_windows(self, rows: Iterable[Row]) -> None:
        """Each token sees those of its window."""
        for row in rows if self._window is not None else ():
            for position in range(max(0, row.num_computed - self._window + 1), row.seq_len):
                self._compare(row, position, position % self._block_size)

    def _compare(self, row: Row, position: int, cell: slice | int) -> None:
        read = self._blocks[:, row.beside[position // self._block_size], cell]
        name = f"{row.request_id} reads beside what is not its token {position}"
        require((read == -int(row.tags[position])).all(), name)
        self.num_read += 1
