"""A worker that runs no model: its cache holds tags, so reading a wrong entry is seen at once.

It keeps batches and block tables as vLLM's model runner does, and lets the product's own `Splitter`
and `RetentionState` say what is read, packed and remembered. Every entry is written with a tag of
the tokens it was computed from, its layer and its head; every read is compared with the tags that
the reading request must see.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.tagged_rows import Row, require
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.step.packing import Packing
from vllm_kvselect.engine.step.received import Received
from vllm_kvselect.engine.step.request import LiveRequests, Phase, Request
from vllm_kvselect.engine.step.rounds import Held, Rounds
from vllm_kvselect.engine.step.sequences import HeadwiseBatch
from vllm_kvselect.engine.step.split import Observation, Split, Splitter, StockPart
from vllm_kvselect.engine.step.state import RetentionState
from vllm_kvselect.methods.choice import Retention
from vllm_kvselect.retention import Cut
from vllm_kvselect.scoring import h2o
from vllm_kvselect.scoring.inputs import ScoringInputs

NUM_LAYERS, NUM_KV_HEADS = 2, 2
CODES = np.arange(NUM_LAYERS * NUM_KV_HEADS).reshape(NUM_LAYERS, NUM_KV_HEADS)


def tags_of_queries(inputs: ScoringInputs) -> torch.Tensor:
    """In place of attention summed up: each query leaves its tag at its own key."""
    tags = torch.zeros(inputs.key.shape[:2], dtype=torch.int64)
    tags[:, inputs.num_scored :] = inputs.query.flatten()
    return tags


def queries_of(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """In place of a scorer: the tags of the queries that it would look through."""
    return inputs.query.flatten()


class TaggedWorker:
    """Executes what a scheduler schedules.

    Args:
        eviction: The server's configuration.
        num_blocks: Blocks of the cache.
        block_size: Tokens per block.
        max_len: Longest request.
        sample: `sample(request_id, index)`: the output token of a request at an index.
        eviction_of: The configuration that each request must be served with, by its id.
        random: Shuffles rows and draws what is retained.
        splitter_class: Splits batches as on a host or as on a device.
    """

    def __init__(
        self,
        eviction: EvictionConfig,
        num_blocks: int,
        block_size: int,
        max_len: int,
        sample: Callable[[str, int], int],
        eviction_of: Callable[[str], EvictionConfig],
        random: Random,
        splitter_class: type[Splitter] = Splitter,
    ) -> None:
        self.eviction, self.block_size, self.max_len = eviction, block_size, max_len
        self.sample, self.eviction_of, self.random = sample, eviction_of, random
        self.requests: dict[str, Row] = {}
        self.rows: list[Row] = []
        self.damaged: set[str] = set()  # requests that may read what they like
        self.cache = np.zeros((NUM_LAYERS, num_blocks, NUM_KV_HEADS, block_size), dtype=np.int64)
        self.state = RetentionState(num_blocks, NUM_LAYERS, NUM_KV_HEADS)
        self.live = LiveRequests(eviction, block_size)
        self.splitter = splitter_class(
            self.state,
            lambda _: [self.live[row.request_id] for row in self.rows],
            block_size,
            TaggedRounds(self).make,
        )
        self._tag_of: dict[tuple[object, ...], int] = {}
        # By first packed block: of which context, and what every head of every layer retained.
        self._packed_at: dict[int, tuple[tuple[object, ...], list[list[np.ndarray]]]] = {}
        self.num_completions = self.num_headwise = self.num_resumed_past_prompt = 0
        self.num_windows_in_chunks = self.num_whole_prompts = self.num_pools = 0
        self.num_mixed = self.num_contexts_found = self.num_turns_found = self.num_rounds = 0
        self.num_sums = 0

    # The batch

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step and returns the tokens sampled in it."""
        self._update(output)
        if self.rows:
            self._forward()
        sampled = [self._sample(row) for row in self.rows]
        ids = [row.request_id for row in self.rows]
        return ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, sampled)

    def shuffle(self) -> None:
        """Reorders the batch, as backends may."""
        self.random.shuffle(self.rows)

    def _update(self, output: SchedulerOutput) -> None:
        self.live.update(output)
        self.live.finish_packing()
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            eviction = self.eviction_of(new.req_id)
            self.requests[new.req_id] = Row(new, eviction, self.block_size, self.max_len)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self.requests[request_id]
            row.num_computed = num_computed
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                row.table, row.tokens = list(blocks[0]), list(cached.all_token_ids[request_id])
                row.num_tagged = min(row.num_tagged, len(row.tokens))
            elif blocks is not None:
                row.table += blocks[0]
        begun = {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids
        for row in self.requests.values():
            row.num_new = output.num_scheduled_tokens.get(row.request_id, 0)
            if row.num_new:
                self._tag(row)
                if row.request_id in begun:
                    self._find_context(row)
        self._condense()

    def _find_context(self, row: Row) -> None:
        """What a request that begins past its cut must read: all of it packed for one request."""
        if row.retained is None or row.num_computed < row.retained.position:
            return
        row.packed_position = row.retained.position
        found, row.packed = self._packed_at.get(row.table[row.retained.num_freed], ((), []))
        require(found == row.context, f"decoding of {row.request_id} found another context")
        self.num_contexts_found += 1
        self.num_turns_found += row.num_computed > row.retained.position

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
            if row.first and index >= row.first.position:
                key = (*key, *row.settings)
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
        # As in an engine: rounds are made before anything of the step is written.
        split = self.splitter.split(common)
        for row in self.rows:
            positions = np.arange(row.num_computed, row.seq_len)
            blocks = np.array(row.table)[positions // self.block_size]
            require((blocks > 0).all(), row.request_id, "writes to the null block")
            self.cache[:, blocks, :, positions % self.block_size] = self._entries(row, positions)
        if split is None:
            split = Split([StockPart(None, common)], [], [], [])
        self._read_stock(split)
        tokens = [row.tags[row.num_computed : row.seq_len] for row in self.rows]
        queries = torch.from_numpy(np.concatenate(tokens))
        if split.seen is not None:
            for layer in range(NUM_LAYERS):
                split.seen.see(layer, queries[:, None, None])
        for observation in split.observations:
            self._observe(observation, queries[observation.tokens])
        self._complete(split)
        require(len(split.after) < 2, "tokens past their cuts are in several parts")
        for part in split.after or [None]:
            assert part is None or isinstance(part, HeadwiseBatch)
            self._read_headwise(part, queries)

    def _observe(self, observation: Observation, tags: torch.Tensor) -> None:
        """Observers see tags for queries; sums of attention gather the tags of their queries."""
        end = observation.first_position + len(tags)
        self.num_windows_in_chunks += end < observation.observer.num_tokens
        with patch.object(h2o, "accumulate", tags_of_queries):
            for layer in range(NUM_LAYERS):
                key = torch.empty(NUM_KV_HEADS, end, 1)
                inputs = ScoringInputs(tags[:, None, None], key, key, 1.0, layer_index=layer)
                observation.observer.observe(inputs, observation.first_position)

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
        rows = [row for row in self.rows if row.num_computed < row.stock_len]
        if not split.before:
            require(not rows, "no prompt tokens are vLLM's")
            return
        (part,) = split.before
        assert isinstance(part, StockPart)
        require(part.common.num_reqs == len(rows), "not all prompt tokens are vLLM's")
        tables, seq_lens = part.common.block_table_tensor.numpy(), part.common.seq_lens.tolist()
        for row, table, seq_len in zip(rows, tables, seq_lens, strict=True):
            require(seq_len == row.stock_len, row.request_id, "is cut at the wrong token")
            self._compare(row, table, seq_len, "prefill")

    def _compare(self, row: Row, table: np.ndarray, seq_len: int, what: str) -> None:
        positions = np.arange(seq_len)
        read = self.cache[:, table[positions // self.block_size], :, positions % self.block_size]
        wrong = read != self._entries(row, positions)
        if wrong.any() and row.request_id not in self.damaged:
            first = int(wrong.any(axis=(1, 2)).argmax())
            require(False, f"{what} of {row.request_id} read a wrong entry of token {first}")

    def _complete(self, split: Split) -> None:
        rows = [
            row
            for row in self.rows
            if row.retained and row.num_computed < row.retained.position <= row.seq_len
        ]
        require(len(rows) == len(split.completions), "other prompts are packed")
        for row, completion in zip(rows, split.completions, strict=True):
            packing = completion.packing
            require(packing.eviction == row.eviction, row.request_id, "has other settings")
            self._check_queries(row, packing)
            packing.request.phase = Phase.SCORED
            if packing.waits:
                packing.finish_all = partial(self._pack, row, packing)  # type: ignore[method-assign]
            else:
                self._pack(row, packing)

    def _check_queries(self, row: Row, packing: Packing) -> None:
        """The observer has seen the window's queries, or each of the prompt's once."""
        assert row.retained is not None
        window, position = self.eviction.window, row.retained.position
        expected = row.tags[position - window : position]
        key = torch.empty(NUM_KV_HEADS, position, 1)
        for layer in range(NUM_LAYERS):
            inputs = ScoringInputs(key[:0], key, key, 1.0, layer_index=layer)
            observer = packing.request.observed_by(NUM_LAYERS)
            seen = observer.scores(inputs, queries_of, row.eviction)
            if row.eviction.method == "h2o":
                expected = np.broadcast_to(row.tags[: position - window], seen.shape)
            require(np.array_equal(seen, expected), row.request_id, "scores with other queries")
        self.num_whole_prompts += row.eviction.method == "h2o"

    def _pack(self, row: Row, packing: Packing) -> None:
        assert row.retained
        self._compare(row, packing.blocks.numpy(), row.retained.position, "selection")
        num_freed, tail_start = row.retained.num_freed, row.retained.tail_start
        # Deterministic, as selection is: a resumed request retains what it retained before.
        random = Random(f"{row.request_id} retains")
        row.packed, row.packed_position = [], row.retained.position
        num_handed_out, retained = 0, []
        self.num_pools += packing.is_pooled
        packed = packing.blocks[num_freed:tail_start].tolist()
        # One run of pages for all layers, or one for each.
        for layers in (
            [[*range(NUM_LAYERS)]] if packing.is_pooled else [[i] for i in range(NUM_LAYERS)]
        ):
            codes = CODES[layers].flatten()
            num_pages = len(packed) * len(codes)
            cuts = sorted(random.randint(0, num_pages) for _ in range(len(codes) - 1))
            entries = []
            parts = zip(codes, [0, *cuts], [*cuts, num_pages], strict=True)
            for head, (code, start, end) in enumerate(parts):
                # More pages than the tokens before the tail could fill are the head's no longer.
                chosen = random.choices(
                    range(tail_start * self.block_size), k=(end - start) * self.block_size
                )
                entries.append(row.tags[sorted(chosen)] * CODES.size + code)
                first = (layers[0] * NUM_KV_HEADS + head) * tail_start * self.block_size
                retained += [first + token for token in sorted(chosen)]
            row.packed += [
                entries[i : i + NUM_KV_HEADS] for i in range(0, len(codes), NUM_KV_HEADS)
            ]
            pages = np.concatenate(entries).reshape(len(layers), len(packed), NUM_KV_HEADS, -1)
            for layer, of_layer in zip(layers, pages, strict=True):
                self.cache[layer, packed] = of_layer
            ends = num_handed_out + torch.tensor([0, *cuts, num_pages])
            offsets = self.state.offsets[
                int(packing.first_packed_block), layers[0] : layers[-1] + 1
            ]
            offsets.copy_(ends.unfold(0, NUM_KV_HEADS + 1, NUM_KV_HEADS))
            num_handed_out += num_pages
        if packing.request.has_sums:
            observer = packing.request.observer
            assert isinstance(observer, h2o.AttentionSums)
            num_competing = tail_start * self.block_size
            given = (row.retained.position, observer.sums, num_competing, torch.tensor(retained))
            packing.request.received = Received.after_cut(*given)
        self._packed_at[packed[0]] = row.context, row.packed
        self.num_completions += 1
        packing.request.phase, packing.request.packing = Phase.PACKED, None
        self.state.complete(packing.request, packing.first_packed_block)

    def _read_headwise(self, batch: HeadwiseBatch | None, queries: torch.Tensor) -> None:
        """Tokens past their prompt read what was retained, then the tail."""
        rows = [row for row in self.rows if row.retained and row.seq_len > row.retained.position]
        require((batch is not None) == bool(rows), "tokens past their prompt are left out")
        if batch is None:
            return
        table = batch.table or batch.rows.page_table(self.state.offsets, self.block_size)
        lengths = table.seq_lens.view(NUM_LAYERS, len(rows), NUM_KV_HEADS).numpy()
        pages = table.pages.view(NUM_LAYERS, len(rows), NUM_KV_HEADS, -1).numpy()
        cache = self.cache.reshape(-1, self.block_size)
        asked = []
        self.num_mixed += len({(row.eviction.method, row.eviction.budget) for row in rows}) > 1
        for index, row in enumerate(rows):
            assert row.retained
            position = row.retained.position
            self.num_headwise += 1
            self.num_resumed_past_prompt += row.num_computed < position
            past = row.tags[max(row.num_computed, position) : row.seq_len]
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


class TaggedLayer:
    """Stands for all layers when entries are moved: what is moved are tags.

    Args:
        cache: `[num_layers, num_blocks, num_kv_heads, block_size]`.
    """

    def __init__(self, cache: np.ndarray) -> None:
        self.kv_cache = torch.from_numpy(cache)[0, ..., None]

    @staticmethod
    def move_slots(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        slots = cache.view(-1)
        slots[targets] = slots[sources].clone()


class TaggedRounds(Rounds):
    """The product's rounds, but for the choice: it is drawn, and all that it could see is checked.

    Args:
        worker: Whose requests they are.
    """

    def __init__(self, worker: TaggedWorker) -> None:
        layers: list[Any] = [TaggedLayer(worker.cache)] * NUM_LAYERS
        super().__init__(layers, worker.state, worker.block_size)
        self._worker = worker

    def _attention(self, layer: Any, query: torch.Tensor, held: Held) -> torch.Tensor:
        """In place of attention summed up: each query leaves its tag at its own key."""
        tags = torch.zeros(NUM_KV_HEADS, held.num_entries, dtype=torch.int64)
        tags[:, held.num_entries - len(query) :] = query.flatten()
        return tags

    def _choose(
        self, request: Request, cut: Cut, held: Held, sums: torch.Tensor | None
    ) -> list[Retention]:
        (row,) = (
            each for each in self._worker.rows if self._worker.live[each.request_id] is request
        )
        retained = row.retained
        require(retained is not None, row.request_id, "has a round that is not due")
        assert retained is not None
        expected = (retained.position, retained.num_freed, retained.tail_start)
        got = (cut.position, cut.first_packed, cut.tail_start)
        require(got == expected, f"a round of {row.request_id} at {got}, not {expected}")
        entries = self._check_held(row, cut, held)
        kept = self._check_kept(row, request, held, entries)
        if sums is None:
            self._check_queries(row, request, cut)
        else:
            self._check_sums(row, request, cut, held, sums, entries)
        # Deterministic, as selection is.
        random = Random(f"{row.request_id} retains at {cut.position}")
        self._worker.num_rounds += 1
        layers = (
            [[*range(NUM_LAYERS)]] if request.method.pooled else [[i] for i in range(NUM_LAYERS)]
        )
        retentions = [self._draw(random, pool, cut, held, kept) for pool in layers]
        row.packed, row.packed_position = [[] for _ in range(NUM_LAYERS)], cut.position
        for pool, retention in zip(layers, retentions, strict=True):
            owner, column = np.divmod(retention.retained.numpy(), held.num_competing)
            for index in range(len(pool) * NUM_KV_HEADS):
                layer, head = pool[index // NUM_KV_HEADS], index % NUM_KV_HEADS
                row.packed[layer].append(entries[layer][head][column[owner == index]])
        return retentions

    def _check_kept(
        self, row: Row, request: Request, held: Held, entries: list[list[np.ndarray]]
    ) -> torch.Tensor:
        """Rounds know which entries came with the prompt's blocks, where they leave them alone."""
        if not request.eviction.keep_prompt:
            require(request.num_kept is None, "a round keeps what competes")
            return torch.zeros_like(held.num_absent)
        kept = request.num_kept
        require(kept is not None, "a round does not keep the prompt")
        assert kept is not None
        is_first = row.packed_position <= row.num_prompt_tokens
        border = -(-row.num_prompt_tokens // self._block_size) * self._block_size
        for layer in range(NUM_LAYERS):
            for head in range(NUM_KV_HEADS):
                start = int(held.num_absent[layer, head])
                own = entries[layer][head][start : start + int(kept[layer, head])]
                if is_first:
                    later = row.tags[border : held.num_entries + border] * CODES.size
                    rest = entries[layer][head][start + len(own) : held.num_entries]
                    row.kept[layer, head] = own
                    require(
                        np.array_equal(rest, later[: len(rest)] + CODES[layer, head]),
                        "a round keeps more than the prompt, or less",
                    )
                require(np.array_equal(own, row.kept[layer, head]), "the prompt is not kept")
        return kept

    def _draw(
        self, random: Random, pool: list[int], cut: Cut, held: Held, num_kept: torch.Tensor
    ) -> Retention:
        """Pages for each head, no more than it can fill, and entries for them."""
        absent = held.num_absent[pool].flatten().tolist()
        kept = num_kept[pool].flatten().tolist()
        room = [(held.num_competing - none) // self._block_size for none in absent]
        pages = [count // self._block_size for count in kept]
        for _ in range(cut.num_packed * len(absent) - sum(pages)):
            head = random.choice([i for i, most in enumerate(room) if pages[i] < most])
            pages[head] += 1
        chosen = []
        for head, count in enumerate(pages):
            first = absent[head] + kept[head]
            others = random.sample(
                range(first, held.num_competing), count * self._block_size - kept[head]
            )
            columns = [*range(absent[head], first), *sorted(others)]
            chosen += [head * held.num_competing + column for column in columns]
        offsets = torch.tensor([0, *np.cumsum(pages).tolist()])
        return Retention(torch.tensor(chosen), offsets)

    def _check_held(self, row: Row, cut: Cut, held: Held) -> list[list[np.ndarray]]:
        """A round sees what was retained and everything after it, and no more."""
        slots = torch.from_numpy(self._worker.cache).view(-1, self._block_size)
        found = []
        before = [each for each in row.rounds if each.position < cut.position]
        last = before[-1] if before else row.at_prompt
        tail = np.arange(last.tail_start * self._block_size if last else 0, cut.position)
        for layer in range(NUM_LAYERS):
            found.append([slots[pages].flatten().numpy() for pages in held.pages[layer]])
            for head in range(NUM_KV_HEADS):
                packed = row.packed[layer][head] if last else np.zeros(0, dtype=np.int64)
                own = row.tags[tail] * CODES.size + CODES[layer, head]
                read = found[layer][head][int(held.num_absent[layer, head]) : held.num_entries]
                require(
                    row.request_id in self._worker.damaged
                    or np.array_equal(read, np.concatenate((packed, own))),
                    f"a round of {row.request_id} read wrong entries: layer {layer}, head {head}",
                )
        return found

    def _check_sums(
        self,
        row: Row,
        request: Request,
        cut: Cut,
        held: Held,
        sums: torch.Tensor,
        entries: list[list[np.ndarray]],
    ) -> None:
        """Every entry has its own sum: the tag that the query of its token left there."""
        require(row.eviction.method == "h2o", row.request_id, "has sums")
        queries = self._queries(request, cut.position)
        self._worker.num_sums += 1
        for layer in range(NUM_LAYERS):
            sums[layer] += self._attention(None, queries[layer], held)
            for head in range(NUM_KV_HEADS):
                own = slice(int(held.num_absent[layer, head]), held.num_entries)
                tags = sums[layer, head, own].numpy() * CODES.size + CODES[layer, head]
                require(
                    row.request_id in self._worker.damaged
                    or np.array_equal(tags, entries[layer][head][own]),
                    f"a round of {row.request_id} has sums of other entries",
                )

    def _check_queries(self, row: Row, request: Request, cut: Cut) -> None:
        for position in range(cut.position - request.eviction.window, cut.position):
            queries, place = request.seen[position]
            tags = queries.of_token(place).flatten()
            require((tags == row.tags[position]).all(), "a round looks through other queries")
