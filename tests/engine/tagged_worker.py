"""A worker that runs no model: its cache holds tags, so reading a wrong entry is seen at once.

It keeps batches and block tables as vLLM's model runner does, and lets the product's own `Splitter`
and `RetentionState` say what is read, packed and remembered. Every entry is written with a tag of
the tokens it was computed from, its layer and its head; every read is compared with the tags that
the reading request must see.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.tagged_beside import TaggedBystander
from tests.engine.tagged_drop import (
    CODES,
    LONGEST,
    NUM_KV_HEADS,
    NUM_LAYERS,
    TaggedDrop,
    TaggedLayer,
)
from tests.engine.tagged_rows import Row, Sizes, require
from tests.engine.tagged_store import MemoryFolder, TaggedStore
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.drop.due import DueDrops
from vllm_kvselect.engine.drop.request import LiveRequests, Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.notice import StepNotice
from vllm_kvselect.engine.sparse.worker_segments import SparseBatch, SparseRow
from vllm_kvselect.engine.step.split import Seen, Split, Splitter, StockPart
from vllm_kvselect.engine.view.sequences import HeadwiseBatch
from vllm_kvselect.scoring import probe
from vllm_kvselect.scoring.inputs import ScoringInputs


def tags_of_entries(inputs: ScoringInputs, first_position: int) -> torch.Tensor:
    """In place of a probe: each entry's score is its tag, and tells its position."""
    tags = inputs.key[..., 0].double() * LONGEST
    return tags + torch.arange(first_position, first_position + tags.shape[1])


@contextmanager
def scoring_tags() -> Iterator[None]:
    """Scores are tags of what they are scores of."""
    with patch.object(probe, "probed_scores", tags_of_entries):
        yield


class TaggedWorker:
    """Executes what a scheduler schedules.

    Args:
        eviction: The server's configuration.
        num_blocks: Blocks of the cache.
        sizes: Tokens of its blocks and kernel blocks.
        max_len: Longest request.
        sample: `sample(request_id, index)`: the output token of a request at an index.
        eviction_of: The configuration that each request must be served with, by its id.
        random: Shuffles rows and draws what is retained.
        splitter_class: Splits batches as on a host or as on a device.
        folder: Where compressed contexts are stored, or None.
        beside: Tokens of a block and of the window of layers that drop nothing; None for a state's.
    """

    def __init__(
        self,
        eviction: EvictionConfig,
        num_blocks: int,
        sizes: Sizes,
        max_len: int,
        sample: Callable[[str, int], int],
        eviction_of: Callable[[str], EvictionConfig],
        random: Random,
        splitter_class: type[Splitter] = Splitter,
        folder: MemoryFolder | None = None,
        beside: tuple[int, int | None] | None = None,
    ) -> None:
        block_size = sizes.page  # the model's layers know kernel blocks alone
        self.eviction, self.block_size, self.max_len = eviction, block_size, max_len
        self.sizes, per_block = sizes, sizes.block // sizes.page
        num_blocks *= per_block
        self.sample, self.eviction_of, self.random = sample, eviction_of, random
        self.requests: dict[str, Row] = {}
        self.rows: list[Row] = []
        self.damaged: set[str] = set()  # requests that may read what they like
        self.cache = np.zeros((NUM_LAYERS, num_blocks, NUM_KV_HEADS, block_size), dtype=np.int64)
        self.state = RetentionState(
            num_blocks, NUM_LAYERS, NUM_KV_HEADS, per_block=per_block, page_size=block_size
        )
        # Scores are tags, which float32 does not hold.
        assert self.state.numbers is not None
        self.state.numbers = self.state.numbers.double()
        self.live = LiveRequests(eviction, *sizes)
        self.bystander = beside and TaggedBystander(self.cache, per_block, *beside)
        self.layers = [TaggedLayer(self.cache, index) for index in range(NUM_LAYERS)]
        self.splitter = splitter_class(
            self.state, lambda _: [self.live[row.request_id] for row in self.rows], block_size
        )
        self.due = DueDrops(self.layers, self.state, block_size)
        self.due.drop_class = type("DropOfWorker", (TaggedDrop,), {"worker": self})
        self._tag_of: dict[tuple[object, ...], int] = {}
        # By first packed block: of which context, and what every head of every layer retained.
        self.packed_at: dict[int, tuple[tuple[object, ...], list[list[np.ndarray]]]] = {}
        self.store = folder and TaggedStore(folder, self.cache, self.state, self.packed_at)
        self.num_completions = self.num_headwise = self.num_windows_in_chunks = 0
        self.num_together = 0
        self.num_pools = self.num_rounds = self.num_in_prompts = self.num_scores_kept = 0
        self.num_mixed = self.num_states_found = self.num_found_with_more = 0
        self.num_to_be_cut_again = 0
        self.num_segments = self.num_sparse_hits = 0

    # The batch

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step and returns the tokens sampled in it."""
        with scoring_tags():
            self._update(output)
            if self.rows:
                self._forward()
        sampled = [self._sample(row) for row in self.rows]
        ids = [row.request_id for row in self.rows]
        result = ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, sampled)
        if self.store:
            self.store.save()
            result.kv_connector_output = self.store.report().as_connector_output()
        return result

    def shuffle(self) -> None:
        """Reorders the batch, as backends may."""
        self.random.shuffle(self.rows)

    def _update(self, output: SchedulerOutput) -> None:
        found = self.live.update(output)
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            eviction = self.eviction_of(new.req_id)
            self.requests[new.req_id] = Row(new, eviction, self.sizes, self.max_len)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self.requests[request_id]
            row.num_computed = num_computed
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                row.add_blocks(blocks, is_new=True)
                row.tokens = list(cached.all_token_ids[request_id])
                row.num_tagged = min(row.num_tagged, len(row.tokens))
            elif blocks is not None:
                row.add_blocks(blocks)
        begun = {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids
        for row in self.requests.values():
            row.num_new = output.num_scheduled_tokens.get(row.request_id, 0)
            if row.num_new:
                self._tag(row)
        for request_id, swap in StepNotice.of(output).swaps.items():
            self.requests[request_id].swap(swap.fresh)
        # As in an engine: cuts are made before anything of the step is written.
        self.due.make(self.live.due)
        self.state.go_on(found)
        # One that begins may find what a cut of this very step has packed.
        for row in self.requests.values():
            if row.num_new and row.request_id in begun:
                self._find_state(row)
                self.num_sparse_hits += bool(row.sparse and row.num_computed > row.sparse.start)
        if self.store:
            self.store.load(output)
        self._condense()

    def _find_state(self, row: Row) -> None:
        """What a request that begins past a cut must read: all of it packed for one request."""
        if row.retained is None:
            return
        row.packed_position = row.retained.position
        found, row.packed = self.packed_at.get(row.table[row.retained.first_packed], ((), []))
        same = row.identity(row.retained.position)
        require(found == same, f"{row.request_id} goes on from another state")
        self.num_states_found += 1
        self.num_found_with_more += row.num_computed > row.retained.position
        self.num_to_be_cut_again += row.retained is not row.cuts[-1]

    def _condense(self) -> None:
        """Fills the rows of requests that do not run with the last ones, then appends new ones."""
        alive = {id(row) for row in self.requests.values() if row.num_new}
        for index in reversed(range(len(self.rows))):
            if id(self.rows[index]) not in alive:
                last = self.rows.pop()
                if index < len(self.rows):
                    self.rows[index] = last
        in_batch = {id(row) for row in self.rows}
        scheduled = [row for row in self.requests.values() if row.num_new]
        self.rows += [row for row in scheduled if id(row) not in in_batch]

    def _tag(self, row: Row) -> None:
        """Tags are the same for the same prefix, but for tokens that saw dropped entries."""
        require(len(row.tokens) >= row.seq_len, row.request_id, "has unknown tokens")
        for index in range(row.num_tagged, row.seq_len):
            key: tuple[object, ...] = (int(row.tags[index - 1]) if index else 0, row.tokens[index])
            if row.sparse and row.sparse.start <= index < row.sparse.end:
                # All queries of a segment choose what it reads.
                segment = tuple(row.tokens[place] for place in row.sparse.segment(index))
                key = (*key, row.eviction.prefill_budget, segment)
            key = (*key, *row.settings(index))
            row.tags[index] = self._tag_of.setdefault(key, len(self._tag_of) + 1)
        row.num_tagged = max(row.num_tagged, row.seq_len)

    def _sample(self, row: Row) -> list[int]:
        if row.seq_len < len(row.tokens):
            return []
        row.tokens.append(self.sample(row.request_id, len(row.tokens) - row.num_prompt_tokens))
        return row.tokens[-1:]

    # The forward pass

    def _forward(self) -> None:
        query_lens = np.array([row.num_new for row in self.rows], dtype=np.int32)
        query_start = np.concatenate(([0], query_lens.cumsum())).astype(np.int32)
        common = self._metadata(query_start)
        split = self.splitter.split(common)
        if self.bystander:
            self.bystander.read_states(self.rows)
            self.bystander.write(self.rows)
        for row in self.rows:
            positions = np.arange(row.num_computed, row.seq_len)
            blocks = np.array(row.table)[positions // self.block_size]
            is_null = blocks < self.sizes.block // self.sizes.page
            require(not is_null.any(), row.request_id, "writes to the null block")
            self.cache[:, blocks, :, positions % self.block_size] = self._entries(row, positions)
        if self.bystander:
            self.bystander.read_windows(self.rows)
        if split is None:
            split = Split([StockPart(None, common)])
        if isinstance(split.seen, Seen):
            split.seen.keep()
        self._read_stock(split)
        self._read_sparse(split)
        tokens = [row.tags[row.num_computed : row.seq_len] for row in self.rows]
        queries = torch.from_numpy(np.concatenate(tokens))
        if split.seen is not None:
            for layer in range(NUM_LAYERS):
                split.seen.see(layer, queries[:, None, None])
        after = [part for part in split.parts if isinstance(part, HeadwiseBatch)]
        require(len(after) < 2, "tokens past their cuts are in several parts")
        for part in after or [None]:
            self._read_headwise(part, queries)

    def _entries(self, row: Row, positions: np.ndarray) -> np.ndarray:
        """Entries of some tokens, `[num_tokens, num_layers, num_kv_heads]`."""
        return row.tags[positions][:, None, None] * CODES.size + CODES

    def _metadata(self, query_start: np.ndarray) -> CommonAttentionMetadata:
        seq_lens = torch.tensor([row.seq_len for row in self.rows], dtype=torch.int32)
        width = max(len(row.table) for row in self.rows)
        table = [row.table + [0] * (width - len(row.table)) for row in self.rows]
        starts = torch.from_numpy(query_start)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(self.rows),
            num_actual_tokens=int(query_start[-1]),
            max_query_len=int(np.diff(query_start).max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=torch.tensor(table, dtype=torch.int32),
            slot_mapping=torch.empty(0, dtype=torch.int64),
        )

    def _read_stock(self, split: Split) -> None:
        """vLLM's own attention reads every token from a request's first one on."""
        rows = [row for row in self.rows if row.retained is None]
        stock = [part for part in split.parts if isinstance(part, StockPart)]
        if not stock:
            require(not rows, "no prompt tokens are vLLM's")
            return
        (part,) = stock
        require(part.common.num_reqs == len(rows), "not all prompt tokens are vLLM's")
        tables, seq_lens = part.common.block_table_tensor.numpy(), part.common.seq_lens.tolist()
        for row, table, seq_len in zip(rows, tables, seq_lens, strict=True):
            require(seq_len == row.seq_len, row.request_id, "is cut at the wrong token")
            self._compare(row, table, seq_len, "prefill")

    def _read_sparse(self, split: Split) -> None:
        """Layers that prefill sparsely read some blocks before each segment, and all of it."""
        rows = [row for row in self.rows if row.sparse_tokens]
        require((split.sparse is not None) == bool(rows), "sparse segments are left out")
        if split.sparse is None:
            return
        (batch,) = (part for part in split.sparse if isinstance(part, SparseBatch))
        beside = [part for part in split.sparse if isinstance(part, StockPart)]
        require(
            [part for part in split.parts if isinstance(part, HeadwiseBatch)]
            == [part for part in split.sparse if isinstance(part, HeadwiseBatch)],
            "tokens past their cuts are others in sparse layers",
        )
        pieces = []
        for row in (row for row in self.rows if row.retained is None):
            begin, end, sparse = row.num_computed, row.seq_len, row.sparse_tokens
            spans = ((begin, sparse.start), (sparse.stop, end)) if sparse else ((begin, end),)
            pieces += [(row, *span) for span in spans if span[0] < span[1]]
        require(len(beside) == bool(pieces), "tokens beside sparse segments are left out")
        for part in beside:
            lens = part.common.query_start_loc.diff().tolist()
            require(lens == [end - begin for _, begin, end in pieces], "others are beside segments")
            tables = part.common.block_table_tensor.numpy()
            ends = part.common.seq_lens.tolist()
            for (row, _, end), table, seq_len in zip(pieces, tables, ends, strict=True):
                require(seq_len == end, row.request_id, "reads too much beside its segments")
                self._compare(row, table, seq_len, "prefill")
        require(len(batch.rows) == len(rows), "segments of other rows")
        for layer in self.layers[split.sparse_layers.start :]:
            for sparse_row, row in zip(batch.rows, rows, strict=True):
                self._read_segments(layer, sparse_row, row)

    def _read_segments(self, layer: "TaggedLayer", segments: SparseRow, row: Row) -> None:
        tokens, eviction, index = row.sparse_tokens, row.eviction, layer.layer_index
        assert row.sparse is not None
        own = self._entries(row, np.arange(tokens.stop))[:, index]  # [num_tokens, num_kv_heads]
        keys = torch.from_numpy(own.T[..., None]).double()
        is_at_hand = self.random.random() < 0.5  # as attention reads them, or else the cache
        query = torch.from_numpy(own[tokens.start :, :, None]).double()
        at_hand = keys[:, row.num_computed :] if is_at_hand else None
        table = segments.table(query, at_hand, 1.0, layer)
        if row.request_id in self.damaged:
            return
        block, size = eviction.prefill_block, row.sparse.size
        starts = range(tokens.start, tokens.stop, size)
        num_blocks = starts[-1] // block
        by_block = keys[:, : num_blocks * block].unflatten(1, (num_blocks, block))
        known = segments.prefill.key_blocks(index).known(num_blocks)
        for found, expected in zip(known, (by_block.amax(2), by_block.amin(2)), strict=True):
            require(torch.equal(found, expected), row.request_id, "knows other keys")
        sequences = [(start, head) for start in starts for head in range(NUM_KV_HEADS)]
        cache, num_read = self.cache.reshape(-1, self.block_size), eviction.prefill_budget + size
        for (start, head), pages, length in zip(sequences, *table, strict=True):
            name = f"a segment of {row.request_id} at {start}"
            require(length == num_read, f"{name} reads {length} entries, not {num_read}")
            read = cache[pages[: num_read // self.block_size]].reshape(-1)
            tags = own[:, head]
            before = {tuple(tags[place : place + block]) for place in range(0, start, block)}
            chosen = {tuple(part) for part in read[:-size].reshape(-1, block).tolist()}
            is_before = len(chosen) == eviction.prefill_budget // block and chosen <= before
            is_own = np.array_equal(read[-size:], tags[start : start + size])
            require(is_before and is_own, f"{name} read wrong entries")
            self.num_segments += 1

    def _compare(self, row: Row, table: np.ndarray, seq_len: int, what: str) -> None:
        positions = np.arange(seq_len)
        read = self.cache[:, table[positions // self.block_size], :, positions % self.block_size]
        wrong = read != self._entries(row, positions)
        if wrong.any() and row.request_id not in self.damaged:
            first = int(wrong.any(axis=(1, 2)).argmax())
            require(False, f"{what} of {row.request_id} read a wrong entry of token {first}")

    def row_of(self, request: Request) -> Row:
        """The row of a live request."""
        (row,) = (row for name, row in self.requests.items() if self.live.get(name) is request)
        return row

    def _read_headwise(self, batch: HeadwiseBatch | None, queries: torch.Tensor) -> None:
        """Tokens past their cuts read what was retained, then the tail."""
        rows = [row for row in self.rows if row.retained]
        require((batch is not None) == bool(rows), "tokens past their cuts are left out")
        if batch is None:
            return
        table = batch.table or batch.rows.page_table(self.state, self.block_size)
        lengths = table.seq_lens.view(NUM_LAYERS, len(rows), NUM_KV_HEADS).numpy()
        pages = table.pages.view(NUM_LAYERS, len(rows), NUM_KV_HEADS, -1).numpy()
        cache = self.cache.reshape(-1, self.block_size)
        asked = []
        self.num_mixed += len({(row.eviction.method, row.eviction.budget) for row in rows}) > 1
        for index, row in enumerate(rows):
            assert row.retained
            self.num_headwise += 1
            past = row.tags[row.num_computed : row.seq_len]
            asked += [past * NUM_KV_HEADS + head for head in range(NUM_KV_HEADS)]
            for layer in range(NUM_LAYERS):
                for head in range(NUM_KV_HEADS):
                    read = cache[pages[layer, index, head]].reshape(-1)
                    length = lengths[layer, index, head]
                    self._compare_head(row, layer, head, read[:length])
        heads = torch.arange(NUM_KV_HEADS)
        got = (queries[:, None] * NUM_KV_HEADS + heads)[batch.pairs].flatten().numpy()
        require(np.array_equal(got, np.concatenate(asked)), "queries of other tokens")
        lens = [len(part) for part in asked]
        require(batch.query_start_loc.diff().tolist() == lens, "queries of other rows")

    def _compare_head(self, row: Row, layer: int, head: int, read: np.ndarray) -> None:
        assert row.retained
        is_packed = row.packed and row.packed_position == row.retained.position
        require(is_packed, f"decoding of {row.request_id} came before its packing")
        tail = np.arange(row.retained.tail_start * self.block_size, row.seq_len)
        expected = row.packed[layer][head], row.tags[tail] * CODES.size + CODES[layer, head]
        require(
            row.request_id in self.damaged or np.array_equal(read, np.concatenate(expected)),
            f"decoding of {row.request_id} read wrong entries: layer {layer}, head {head}",
        )
