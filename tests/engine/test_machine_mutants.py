"""The state machine finds every planted mutant.

Each breaks one thing, somewhere else than the machine looks for it.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from hypothesis import Phase
from vllm.v1.core.block_pool import BlockPool

from tests.engine.machine import (
    BUT_PREFILL,
    quiet,  # noqa: F401 (fixture)
    run,
    settings_of_servers,
)
from tests.engine.simulated_server import IntegrityError, LostError, Server, Settings
from tests.engine.tagged_drop import NUM_KV_HEADS, TaggedDrop, TaggedLayer
from tests.engine.tagged_rows import WrongEntryError
from vllm_kvselect.config import OVERRIDE_NAMES, EvictionConfig
from vllm_kvselect.engine.drop import request as step_request
from vllm_kvselect.engine.drop.columns import Columns
from vllm_kvselect.engine.drop.drop import Drop
from vllm_kvselect.engine.drop.request import LiveRequests, Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.scheduler import block_manager
from vllm_kvselect.engine.scheduler.block_manager import (
    HeadwiseManager,
    PlannedManager,
    StateManager,
)
from vllm_kvselect.engine.scheduler.cut_scheduler import CutScheduler
from vllm_kvselect.engine.sparse import worker_segments
from vllm_kvselect.engine.states import names as state_names
from vllm_kvselect.engine.states.names import StateNames
from vllm_kvselect.engine.states.salted_hashes import salted
from vllm_kvselect.engine.step import split as step_split
from vllm_kvselect.engine.view.page_tables import SettledRows
from vllm_kvselect.engine.view.rows import Rows
from vllm_kvselect.engine.view.sequences import HeadwiseBatch
from vllm_kvselect.planning import cuts as plan_cuts
from vllm_kvselect.planning import plan as plan_module
from vllm_kvselect.planning.cuts import Cut, Cuts
from vllm_kvselect.planning.plan import Plan, plan
from vllm_kvselect.planning.segments import Segments
from vllm_kvselect.prefilling.blocks import ChosenBlocks
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.memory import StepQueries


def cap_of(manager: HeadwiseManager, request: Any, num_prompt_tokens: int) -> int | None:
    params, token_ids = request.sampling_params, request.prompt_token_ids
    made = plan(manager.eviction, params, token_ids, num_prompt_tokens, manager.block_size).cuts
    return made.most_found(manager.block_size, manager.eviction.window) if made else None


def name_packed_blocks_as_what_was_there(patch: pytest.MonkeyPatch) -> None:
    def cache_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        cache(self, request, *args, **kwargs)
        blocks = self.req_to_blocks[request.request_id]
        cut = self.plan_of(request).cuts.last_made(request.num_computed_tokens)
        if cut and blocks[cut.num_freed].block_hash is None:
            span = cut.num_freed, cut.num_freed + 1
            self.block_pool.cache_full_blocks(request, blocks, *span, self.block_size, 0)

    cache = HeadwiseManager.cache_blocks
    patch.setattr(HeadwiseManager, "cache_blocks", cache_blocks)


def cap_hits_by_the_tokens_so_far(patch: pytest.MonkeyPatch) -> None:
    def most_found(self: HeadwiseManager, request: Any) -> int:
        cap = cap_of(self, request, request.num_tokens)
        return request.num_tokens if cap is None else cap

    patch.setattr(HeadwiseManager, "most_found", most_found)


def do_not_cap_hits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeadwiseManager, "most_found", lambda _, request: int(request.num_tokens))


def free_a_block_too_many(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: HeadwiseManager, request_id: str, num_tokens: int, num_main: int) -> Any:
        cut = self._due_cut(request_id, num_main)
        made = allocate_new_blocks(self, request_id, num_tokens, num_main)
        if cut is not None:
            self._remove_blocks_in_range(request_id, 0, cut.num_freed + 1)
        return made

    allocate_new_blocks = HeadwiseManager.allocate_new_blocks
    patch.setattr(HeadwiseManager, "allocate_new_blocks", allocate)


def swap_no_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeadwiseManager, "_due_cut", lambda *_: None)


def swap_blocks_a_token_early(patch: pytest.MonkeyPatch) -> None:
    def early(self: HeadwiseManager, request_id: str, num_tokens: int) -> Cut | None:
        return due_cut(self, request_id, num_tokens + 1)

    due_cut = HeadwiseManager._due_cut
    patch.setattr(HeadwiseManager, "_due_cut", early)


def swap_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    """The blocks that are given back count as free though others hold them."""

    def num_blocks(self: HeadwiseManager, request_id: str, *args: Any, **kwargs: Any) -> int:
        shared = [block for block in self.req_to_blocks.get(request_id, ()) if block.ref_cnt > 1]
        for block in shared:
            block.ref_cnt -= 1
        found: int = get_num_blocks(self, request_id, *args, **kwargs)
        for block in shared:
            block.ref_cnt += 1
        return found

    get_num_blocks = HeadwiseManager.get_num_blocks_to_allocate
    patch.setattr(HeadwiseManager, "get_num_blocks_to_allocate", num_blocks)


def keep_state_by_row(patch: pytest.MonkeyPatch) -> None:
    headwise_batch = step_split.headwise_batch

    def places(self: TaggedDrop) -> list[int]:
        return [[*self.worker.live].index(request) for request in self.requests]

    def headwise(rows: Rows, chosen: np.ndarray, *args: Any) -> HeadwiseBatch:
        made = headwise_batch(rows, chosen, *args)
        by_row = replace(made.rows, first_packed_blocks=torch.from_numpy(chosen))
        return replace(made, rows=by_row)

    patch.setattr(TaggedDrop, "keys", property(places))
    patch.setattr(step_split, "headwise_batch", headwise)


def end_at_segments_alone(self: CutScheduler, request: Any, num_computed: int, num_new: int) -> int:
    segments = block_manager.headwise_manager(self.kv_cache_manager).plan_of(request).segments
    end = num_computed + num_new
    return num_new if segments is None else max(0, segments.last_border(end) - num_computed)


def end_chunks_at_segments_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CutScheduler, "_reserve_prefill_lookahead", end_at_segments_alone)


def keep_the_progress_of_preempted_requests(patch: pytest.MonkeyPatch) -> None:
    def pause_once(self: Request) -> None:
        if not hasattr(self, "progress"):
            pause(self)

    def go_on(self: Request, num_computed: int, _: Any) -> None:
        self.num_computed = num_computed

    pause = Request.pause
    patch.setattr(Request, "pause", pause_once)
    patch.setattr(Request, "begin", go_on)


def plan_a_cut_less_in_workers(patch: pytest.MonkeyPatch) -> None:
    def behind(*args: Any) -> Plan:
        made = plan(*args)
        return replace(made, cuts=Cuts(made.cuts[:-1]))

    patch.setattr(step_request, "plan", behind)


def plan_as_the_server(server: EvictionConfig, params: Any, *args: Any) -> Plan:
    params = copy.copy(params)
    params.extra_args = None
    return plan(server, params, *args)


def plan_blocks_with_the_servers_settings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_manager, "plan", plan_as_the_server)


def plan_pages_with_the_servers_settings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_request, "plan", plan_as_the_server)


def let_every_request_choose(patch: pytest.MonkeyPatch) -> None:
    planned_by_all = plan_module.planned_config

    def planned_config(server: EvictionConfig, params: Any) -> EvictionConfig:
        open_server = server.model_copy(update={"allow_override": OVERRIDE_NAMES})
        chosen = planned_by_all(open_server, params)
        return chosen.model_copy(update={"allow_override": server.allow_override})

    patch.setattr(plan_module, "planned_config", planned_config)


def keep_page_tables_of_as_many_rows(patch: pytest.MonkeyPatch) -> None:
    def same_shape(rows: SettledRows, other: SettledRows, _: int) -> bool:
        return rows.block_table.shape == other.block_table.shape

    patch.setattr(SettledRows, "has_pages_of", same_shape)


def make_cuts_a_step_late(patch: pytest.MonkeyPatch) -> None:
    def update_late(self: LiveRequests, scheduled: Any) -> list[Request]:
        found = update(self, scheduled)
        self.due, late[self] = late.get(self, []), self.due
        return found

    update, late = LiveRequests.update, WeakKeyDictionary[LiveRequests, list[Request]]()
    patch.setattr(LiveRequests, "update", update_late)


def make_each_cut_twice(patch: pytest.MonkeyPatch) -> None:
    complete, made = Request.complete_cut, WeakKeyDictionary[Request, set[int]]()

    def forget_once(self: Request, cut: Cut, *args: Any) -> None:
        positions = made.setdefault(self, set())
        complete(self, cut, *args)
        if cut.position not in positions:
            positions.add(cut.position)
            self.progress.num_made -= 1

    patch.setattr(Request, "complete_cut", forget_once)


def leave_contexts_that_one_token_follows(patch: pytest.MonkeyPatch) -> None:
    def update_without(self: LiveRequests, scheduled: Any) -> Any:
        found = update(self, scheduled)
        self.due = [
            each
            for each in self.due
            if not each.plan.has_context or each.plan.num_prompt_tokens - each.num_computed > 1
        ]
        return found

    update = LiveRequests.update
    patch.setattr(LiveRequests, "update", update_without)


def find_what_is_left_of_states(patch: pytest.MonkeyPatch) -> None:
    find, all_names = StateNames.find, StateNames._names

    def names_that_are_there(self: StateNames, *args: Any) -> list[Any]:
        names = all_names(self, *args)
        return [name for name in names if self._cached(name) is not None]

    def find_rest(self: StateNames, *args: Any) -> list[Any]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(StateNames, "_names", names_that_are_there)
            return find(self, *args)

    patch.setattr(StateNames, "find", find_rest)


def name_states_by_their_places_alone(patch: pytest.MonkeyPatch) -> None:
    def salts(eviction: EvictionConfig, cuts: Cuts, hash_size: int) -> tuple[Any, ...]:
        return tuple((cut.position // hash_size, bytes(cut.position)) for cut in cuts)

    patch.setattr(state_names, "_salts", salts)


def name_states_without_their_budgets(patch: pytest.MonkeyPatch) -> None:
    of_all = state_names.settings_of_the_choice

    def salts(eviction: EvictionConfig, cuts: Cuts, hash_size: int) -> tuple[Any, ...]:
        salt = of_all(eviction, "budget", "least").encode()
        return tuple((cut.position // hash_size, salt) for cut in cuts)

    patch.setattr(state_names, "_salts", salts)


def name_blocks_behind_a_cut_by_their_places(patch: pytest.MonkeyPatch) -> None:
    """A fork reads what its sibling computed."""

    def salt_hashes(request: Any, salts: Any) -> None:
        salt(request, salts)
        if salts:
            first = min(salts)
            for index in range(first + 1, len(request.block_hashes)):
                above = max(each for each in salts if each <= index)
                if index > above:
                    request.block_hashes[index] = salted(
                        request.block_hashes[above], bytes([index])
                    )

    salt = block_manager.salt_hashes
    patch.setattr(block_manager, "salt_hashes", salt_hashes)


def leave_the_counter_of_hashed_blocks(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: HeadwiseManager, request_id: str, num_tokens: int, num_main: int) -> Any:
        num_hashed = self.num_cached_block.get(request_id, 0)
        cut = self._due_cut(request_id, num_main)
        made = allocate_new_blocks(self, request_id, num_tokens, num_main)
        if cut is not None:
            self.num_cached_block[request_id] = min(num_hashed, cut.num_freed)
        return made

    allocate_new_blocks = HeadwiseManager.allocate_new_blocks
    patch.setattr(HeadwiseManager, "allocate_new_blocks", allocate)


def find_states_up_to_the_next_cut(patch: pytest.MonkeyPatch) -> None:
    def most(self: StateNames, request: Any, made: Plan, index: int) -> int:
        following = made.cuts[index + 1].position if index + 1 < len(made.cuts) else 1000
        return min(request.num_tokens - 1, following) // self._block_size

    patch.setattr(StateNames, "_most_blocks", most)


def hold_no_contexts_that_are_found(patch: pytest.MonkeyPatch) -> None:
    touch = BlockPool.touch

    def touch_stock(self: BlockPool, blocks: Any) -> None:
        touch(self, [] if any(block.is_null for block in blocks) else blocks)

    patch.setattr(BlockPool, "touch", touch_stock)


def forget_offsets_with_their_request(patch: pytest.MonkeyPatch) -> None:
    make, update = Drop.make, LiveRequests.update
    drops: dict[Request, tuple[RetentionState, int]] = {}

    def note(self: Drop) -> None:
        keys = self.keys
        make(self)
        drops.update(
            {each: (self._state, key) for each, key in zip(self.requests, keys, strict=True)}
        )

    def update_and_forget(self: LiveRequests, scheduled: Any) -> list[Request]:
        for request_id in scheduled.finished_req_ids:
            if made := drops.pop(self.get(request_id), None):
                state, key = made
                state.offsets[key] = 0
        return update(self, scheduled)

    patch.setattr(Drop, "make", note)
    patch.setattr(LiveRequests, "update", update_and_forget)


def keep_the_offsets_of_the_cut_before(patch: pytest.MonkeyPatch) -> None:
    kept_by = WeakKeyDictionary[RetentionState, torch.Tensor]()

    def store_old(self: RetentionState, keys: torch.Tensor, offsets: torch.Tensor) -> None:
        old, kept_by[self] = kept_by.get(self), offsets[0]
        is_alike = old is not None and old.flatten()[-1] == offsets.flatten()[-1]
        store(self, keys, old[None] if old is not None and is_alike else offsets)

    store = RetentionState.store
    patch.setattr(RetentionState, "store", store_old)


def read_freed_blocks_once_more(patch: pytest.MonkeyPatch) -> None:
    def of_everything(requests: Any, *args: Any) -> Columns:
        as_new = [
            SimpleNamespace(
                plan=each.plan,
                next_cut=each.next_cut,
                last_cut=None,
                progress=SimpleNamespace(longest_run=None, swap=each.progress.swap),
            )
            for each in requests
        ]
        return of_all(as_new, *args)

    of_all = Columns.of
    patch.setattr(Columns, "of", of_everything)


def move_entries_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def backwards(self: TaggedLayer, pages: torch.Tensor, retained: torch.Tensor, *to: Any) -> None:
        move(self, pages, retained.flip(0), *to)

    move = TaggedLayer.move
    patch.setattr(TaggedLayer, "move", backwards)


def look_through_the_queries_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    def shifted(self: StepQueries, tokens: Any, num_layers: int) -> None:
        if isinstance(tokens, slice):
            tokens = torch.arange(tokens.start, tokens.stop)
        init(self, (tokens - 1).clamp(min=0), num_layers)

    init = StepQueries.__init__
    patch.setattr(StepQueries, "__init__", shifted)


def plan_rounds_without_the_scheduler(patch: pytest.MonkeyPatch) -> None:
    def without_rounds(*args: Any) -> Plan:
        made = plan(*args)
        num_prompt_cuts = made.cuts.num_made(made.num_prompt_tokens)
        return replace(made, cuts=Cuts(made.cuts[:num_prompt_cuts]))

    patch.setattr(block_manager, "plan", without_rounds)


def leave_numbers_with_other_entries(patch: pytest.MonkeyPatch) -> None:
    def keep(self: RetentionState, packed_blocks: torch.Tensor, numbers: torch.Tensor) -> None:
        keep_numbers(self, packed_blocks, numbers.roll(1))

    keep_numbers = RetentionState.keep_numbers
    patch.setattr(RetentionState, "keep_numbers", keep)


def keep_the_numbers_of_the_state_before(patch: pytest.MonkeyPatch) -> None:
    def keep(self: RetentionState, packed_blocks: torch.Tensor, numbers: torch.Tensor) -> None:
        before = self.numbers.clone()
        keep_numbers(self, packed_blocks, numbers)
        self.numbers = torch.where(before != 0, before, self.numbers)

    keep_numbers = RetentionState.keep_numbers
    patch.setattr(RetentionState, "keep_numbers", keep)


def let_requests_of_a_pass_swap_their_pages(patch: pytest.MonkeyPatch) -> None:
    def swapped(requests: Any, *args: Any) -> Columns:
        columns = of_all(requests, *args)
        return replace(columns, pages=columns.pages.flip(0))

    of_all = Columns.of
    patch.setattr(Columns, "of", swapped)


def let_layers_swap_what_they_retain(patch: pytest.MonkeyPatch) -> None:
    def swapped(self: Drop, retained: torch.Tensor, layers: slice) -> None:
        per_layer = NUM_KV_HEADS * self.columns.num_competing
        row = retained // per_layer
        move(self, retained + (row ^ 1) * per_layer - row * per_layer, layers)

    move = Drop._move
    patch.setattr(Drop, "_move", swapped)


def hash_what_was_computed_from_less(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannedManager, "_last_position", lambda *_: None)


def let_chunks_run_past_cuts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cuts, "next_after", lambda *_: None)


def compete_with_the_latest_interval(patch: pytest.MonkeyPatch) -> None:
    def cut_at(position: int, block: int, page: int, latest: int, entries: int) -> Cut | None:
        return made_at(position, block, page, min(latest, 9), entries)

    made_at = plan_cuts._cut_at
    patch.setattr(plan_cuts, "_cut_at", cut_at)


def name_sparse_blocks_as_dense_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_manager, "sparse_names", lambda hashes, *_: list(hashes))


def let_chunks_end_inside_segments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segments, "last_border", lambda self, position: position)


def choose_blocks_of_the_segment_itself(patch: pytest.MonkeyPatch) -> None:
    def critical(current: torch.Tensor, num_before: torch.Tensor, count: int) -> ChosenBlocks:
        return most_critical(current.flip(-1), num_before + 1, count)

    most_critical = worker_segments.most_critical
    patch.setattr(worker_segments, "most_critical", critical)


def free_a_block_that_a_page_needs(patch: pytest.MonkeyPatch) -> None:
    rounded_up = property(lambda cut: -(-cut.first_packed // cut.per_block))
    patch.setattr(Cut, "num_freed", rounded_up)


def take_pages_for_blocks(patch: pytest.MonkeyPatch) -> None:
    def kernel_blocks(self: LiveRequests, block_ids: list[int]) -> list[int]:
        return [block_id + part for block_id in block_ids for part in range(self.per_block)]

    patch.setattr(LiveRequests, "_kernel_blocks", kernel_blocks)


def find_hits_without_their_states(patch: pytest.MonkeyPatch) -> None:
    def without_state(*args: Any, block_pool: BlockPool, **kwargs: Any) -> Any:
        blocks, num_tokens = find(*args, block_pool=block_pool, **kwargs)
        return tuple([block_pool.null_block] * len(group) for group in blocks), num_tokens

    find = StateManager.find_longest_cache_hit
    patch.setattr(StateManager, "find_longest_cache_hit", without_state)


def score_new_entries_as_other_tokens(patch: pytest.MonkeyPatch) -> None:
    def held(self: Drop) -> Held:
        found = hold(self)
        if found.numbers is None:
            return found
        return replace(found, positions=[each + self._page_size for each in found.positions])

    hold = Drop._held
    patch.setattr(Drop, "_held", held)


Errors = type[Exception] | tuple[type[Exception], ...]

FINDINGS = (IntegrityError, LostError, WrongEntryError)
"""Whichever comes first finds a mutant: that depends on what is drawn."""

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a block freed that a page still needs": free_a_block_that_a_page_needs,
    "a page addressed with a block's stride": take_pages_for_blocks,
    "a hit without the state behind it": find_hits_without_their_states,
    "a packed block named as what was there": name_packed_blocks_as_what_was_there,
    "hits not capped": do_not_cap_hits,
    "one block too many freed": free_a_block_too_many,
    "blocks swapped a token early": swap_blocks_a_token_early,
    "no block swapped": swap_no_blocks,
    "what others hold counted as given back": swap_what_others_hold,
    "state kept by batch row": keep_state_by_row,
    "page tables kept though blocks changed": keep_page_tables_of_as_many_rows,
    "a cut a step late": make_cuts_a_step_late,
    "a cut made twice": make_each_cut_twice,
    "a progress not replaced at preemption": keep_the_progress_of_preempted_requests,
    "a plan of the worker one cut behind": plan_a_cut_less_in_workers,
    "half a state found": find_what_is_left_of_states,
    "a state found under other settings": name_states_by_their_places_alone,
    "a state found under another budget": name_states_without_their_budgets,
    "a fork that reads its sibling's blocks": name_blocks_behind_a_cut_by_their_places,
    "the counter of hashed blocks not moved": leave_the_counter_of_hashed_blocks,
    "a state found up to a cut that is not made": find_states_up_to_the_next_cut,
    "a context given back while it is read": hold_no_contexts_that_are_found,
    "offsets of a context end with its first owner": forget_offsets_with_their_request,
    "hashes of what was computed from less": hash_what_was_computed_from_less,
    "a context's cut left out": leave_contexts_that_one_token_follows,
    "a chunk past its cuts": let_chunks_run_past_cuts,
    "a chunk that ends at segments alone": end_chunks_at_segments_alone,
    "the latest interval competes": compete_with_the_latest_interval,
    "the offsets of the cut before": keep_the_offsets_of_the_cut_before,
    "freed blocks read once more": read_freed_blocks_once_more,
    "entries moved elsewhere": move_entries_in_another_order,
    "a drop looks through other queries": look_through_the_queries_of_the_token_before,
    "two requests of a pass swap their pages": let_requests_of_a_pass_swap_their_pages,
    "layers swap what they retain": let_layers_swap_what_they_retain,
    "a number that does not move with its entry": leave_numbers_with_other_entries,
    "a state with the numbers of the one before it": keep_the_numbers_of_the_state_before,
    "a new entry scored as another token": score_new_entries_as_other_tokens,
    "rounds that the scheduler does not know": plan_rounds_without_the_scheduler,
    "the server's settings for a request's blocks": plan_blocks_with_the_servers_settings,
    "the server's settings for a request's pages": plan_pages_with_the_servers_settings,
    "sparse blocks named as dense ones": name_sparse_blocks_as_dense_ones,
    "a chunk that ends inside a segment": let_chunks_end_inside_segments,
    "a segment reads what is not before it": choose_blocks_of_the_segment_itself,
    "settings taken that the server does not allow": let_every_request_choose,
}

PAST_A_CUT = (RuntimeError, AssertionError), "runs past|not at a cut"
ANY_WORDS = r"\S"
OTHER_ERRORS: dict[str, tuple[tuple[type[Exception], ...], str]] = {
    "a page addressed with a block's stride": ((IndexError,), "out of bounds"),
    "hits not capped": ((IndexError,), "out of range"),
    "blocks swapped a token early": PAST_A_CUT,
    "what others hold counted as given back": ((ValueError,), "free blocks"),
    "a state found up to a cut that is not made": ((ValueError,), "free blocks"),
    "the counter of hashed blocks not moved": ((AssertionError,), ""),
    "a hit without the state behind it": ((AssertionError,), "beside"),
    "a progress not replaced at preemption": (
        (AssertionError, LookupError, RuntimeError),
        ANY_WORDS,
    ),
    "a chunk past its cuts": PAST_A_CUT,
    "a cut a step late": PAST_A_CUT,
    "a cut made twice": PAST_A_CUT,
    "a context's cut left out": PAST_A_CUT,
    "a chunk that ends at segments alone": PAST_A_CUT,
    "freed blocks read once more": ((IndexError,), "out of bounds"),
    "rounds that the scheduler does not know": ((RuntimeError,), "the same plan|runs past"),
    "sparse blocks named as dense ones": ((ValueError,), "inside a segment"),
    "a chunk that ends inside a segment": ((IndexError, RuntimeError, ValueError), ANY_WORDS),
    "a segment reads what is not before it": ((RuntimeError, IndexError), ANY_WORDS),
}
"""What finds some mutants, too, with words that tell it from a mistake in the mutant."""


def sharing_contexts(drawn: Settings, prompt_interval: int) -> Settings:
    """A server with few spare blocks, whose requests share contexts."""
    values = {"method": "adakv", "context": None, "decode_budget": 0, "prefill": "dense"}
    values |= {"allow_override": BUT_PREFILL, "prompt_interval": prompt_interval}
    return replace(
        drawn,
        eviction=drawn.eviction.model_copy(update=values),
        enable_prefix_caching=True,
        num_spare_blocks=drawn.num_spare_blocks // 4,
        long_prefill_token_threshold=0,
        page_size=None,
        beside=None,
    )


def of_contexts(prompt_interval: int) -> dict[str, Any]:
    """What the machine is given to look at contexts alone."""
    servers = settings_of_servers().map(partial(sharing_contexts, prompt_interval=prompt_interval))
    return {"servers": servers, "without": ("generate", "shuffle", "reset_prefix_cache")}


OF_SMALL_PAGES = {
    "servers": settings_of_servers().filter(lambda drawn: drawn.sizes.page < drawn.sizes.block)
}
OF_PROBES = {
    "servers": settings_of_servers().map(
        lambda drawn: replace(
            drawn, eviction=drawn.eviction.model_copy(update={"method": "layer-probe"})
        )
    )
}
BESIDE_WINDOWS = {
    "servers": settings_of_servers().filter(lambda drawn: drawn.beside and drawn.beside.window)
}
BESIDE_STATES = {
    "servers": settings_of_servers().filter(lambda drawn: drawn.beside and not drawn.beside.window)
}
SHY = {
    "a block freed that a page still needs": OF_SMALL_PAGES,
    "a hit without the state behind it": BESIDE_STATES,
    "a page addressed with a block's stride": OF_SMALL_PAGES,
    "half a state found": of_contexts(0),
    "a state found under other settings": of_contexts(0),
    "a state found under another budget": of_contexts(10),
    "a fork that reads its sibling's blocks": of_contexts(10),
    "the counter of hashed blocks not moved": of_contexts(10),
    "a state found up to a cut that is not made": of_contexts(10),
    "a context given back while it is read": of_contexts(0),
    "offsets of a context end with its first owner": of_contexts(0),
    "hashes of what was computed from less": BESIDE_WINDOWS,
    "a context's cut left out": of_contexts(0),
    "a state with the numbers of the one before it": OF_PROBES,
}
"""What shows once in 20,000 steps of all that servers do is looked for where it may be."""


@pytest.mark.parametrize("prompt_interval", [0, 17])
def test_nothing_is_found_there_without_a_mutant(prompt_interval: int) -> None:
    run(20, Counter(), derandomize=True, phases=(Phase.generate,), **of_contexts(prompt_interval))


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    errors, words = OTHER_ERRORS.get(name, ((), ""))
    seen: Counter[str] = Counter()
    with pytest.raises((*FINDINGS, *errors)) as found:
        # Most mutants are found within some 2,000 steps.
        run(2000, seen, derandomize=True, phases=(Phase.generate,), **SHY.get(name, {}))
    if not isinstance(found.value, FINDINGS):
        found.match(words)


def resume_beside_one_who_keeps_the_same_text() -> None:
    """Of a request that was preempted while it answered, all it had said stands in the cache."""
    eviction = EvictionConfig(
        method="adakv", budget=20, window=4, allow_override=("method", "budget")
    )
    server = Server(Settings(eviction=eviction, policy="priority", num_spare_blocks=16))
    stock = {"kv_eviction": "none"}
    server.add([*range(1000, 1100)], 58, 2)
    answering = server.all["r1"]
    while len(answering.received) < 30:
        server.step()
    server.add([*answering.prompt, *answering.received], 25, 0, stock)
    for _ in range(2):
        server.step()
    server.add([*range(5000, 5040)], 2, 0, stock)  # takes the blocks of the first one
    for _ in range(6):
        server.step()
    assert server.scheduler.requests["r1"].num_preemptions
    server.drain()


def test_the_hit_cap_taken_from_num_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine draws such a case too seldom."""
    resume_beside_one_who_keeps_the_same_text()
    cap_hits_by_the_tokens_so_far(monkeypatch)
    with pytest.raises((IntegrityError, LostError, WrongEntryError, AssertionError)):
        resume_beside_one_who_keeps_the_same_text()
