"""Stored contexts that come late, fail or are given up; every planted mutant is found."""

import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from tests.engine.simulated_server import IntegrityError, LostError, Server, Settings
from tests.engine.tagged_rows import WrongEntryError
from vllm_kvselect.config import OVERRIDE_NAMES, EvictionConfig
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager
from vllm_kvselect.engine.states import loads as scheduler_loads
from vllm_kvselect.engine.states import stored_names
from vllm_kvselect.engine.states.loads import ContextLoads
from vllm_kvselect.engine.states.worker_contexts import StoredContexts
from vllm_kvselect.engine.states.worker_files import Transfers
from vllm_kvselect.store.file import Stored

NUM_SERVERS, NUM_ACTIONS = 20, 120
METHODS = ("adakv", "adakv-perturb", "layer-keydiff", "knorm")
ALLOWED = tuple(name for name in OVERRIDE_NAMES if not name.startswith("prefill"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm.v1.core.block_pool", "vllm.kvselect"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def serve(seed: int, seen: Counter[str]) -> None:
    """Asks, leaves, waits and resets in any order; resets lose what is in the pool."""
    random = Random(seed)
    block_size = random.choice((4, 8))
    eviction = EvictionConfig(
        method=random.choice(METHODS),
        window=random.randint(1, 6),
        budget=random.choice((21, 0.4)),
        allow_override=ALLOWED,
        context_store="folder",
    )
    settings = Settings(
        block_size=block_size,
        num_spare_blocks=random.randint(0, 16),
        eviction=eviction,
        max_num_batched_tokens=random.choice((16, 64, 200)),
        policy=random.choice(("fcfs", "priority")),
        async_scheduling=random.random() < 0.5,
        stores=True,
    )
    server = Server(settings, seed, seen)
    for _ in range(NUM_ACTIONS):
        _act(server, random)
    server.drain()
    store = server.worker.store
    assert store
    seen["stored"] += store.folder.num_written
    seen["loaded"] += store.num_loaded
    seen["failed"] += store.num_failed
    seen["found"] += server.worker.num_states_found


def _serve_all(num_servers: int, seen: Counter[str]) -> None:
    for seed in range(num_servers):
        serve(seed, seen)


def _act(server: Server, random: Random) -> None:
    action = random.random()
    if action < 0.25 and len(server.unfinished) < 8:
        number, length = random.randrange(4), random.choice((64, 64, 90))
        context = [-(100 * number + 2_000_000 + i) for i in range(length)]
        own = [-(10_000 * (len(server.all) + 1) + i) for i in range(random.randrange(20))]
        extra_args: dict[str, Any] = {"kv_eviction_context": length}
        if random.random() < 0.2:
            extra_args["kv_eviction"] = random.choice(METHODS)
        if random.random() < 0.2:
            extra_args = {}
        server.add(context + own, random.choice((1, 2, 9)), random.randrange(2), extra_args)
    elif action < 0.35 and server.unfinished:
        waiting = server.loads.held
        server.seen["given up"] += bool(waiting)
        server.abort(random.choice([*server.unfinished]))
    elif action < 0.45:
        server.seen["reset while loading"] += bool(server.loads.held)
        server.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        for _ in range(random.randint(1, 6)):
            server.step(random.choice((5, 16, 64, 200)))


def test_nothing_is_read_early_lost_or_mixed_up_however_loads_end() -> None:
    seen: Counter[str] = Counter()
    _serve_all(NUM_SERVERS, seen)
    for reached in (
        "stored",
        "loaded",
        "failed",
        "found",
        "given up",
        "reset while loading",
        "preempted",
    ):
        assert seen[reached] >= 5, (reached, seen)


def find_a_context_a_step_early(patch: pytest.MonkeyPatch) -> None:
    begin = ContextLoads._begin

    def begin_and_name(self: ContextLoads, *args: Any) -> bool:
        has_begun = begin(self, *args)
        if has_begun:
            load = self._pending[self._num_loads]
            self._names.take(load.request, load.plan, load.plan.num_states - 1, load.blocks)
        return has_begun

    patch.setattr(ContextLoads, "_begin", begin_and_name)


def find_a_context_before_it_is_read_without_holding_its_blocks(patch: pytest.MonkeyPatch) -> None:
    find_a_context_a_step_early(patch)
    patch.setattr(HeadwiseManager, "loads_held", {})


def take_what_failed(patch: pytest.MonkeyPatch) -> None:
    finish = ContextLoads.finish

    def finish_all(self: ContextLoads, loaded: dict[int, bool]) -> None:
        finish(self, dict.fromkeys(loaded, True))

    patch.setattr(ContextLoads, "finish", finish_all)


def keep_writing_to_blocks_that_were_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfers, "drop", lambda *_: None)


def take_half_a_file(patch: pytest.MonkeyPatch) -> None:
    put = StoredContexts._put

    def put_half(self: StoredContexts, block_ids: list[int], stored: Stored) -> None:
        pages = stored.pages.clone()
        pages[len(pages) // 2 :] = 0
        put(self, block_ids, stored._replace(pages=pages))

    patch.setattr(StoredContexts, "_put", put_half)


def take_the_blocks_in_another_order(patch: pytest.MonkeyPatch) -> None:
    put = StoredContexts._put

    def put_reversed(self: StoredContexts, block_ids: list[int], stored: Stored) -> None:
        put(self, block_ids, stored._replace(pages=stored.pages.flip(1)))

    patch.setattr(StoredContexts, "_put", put_reversed)


def take_the_offsets_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    put = StoredContexts._put

    def put_others(self: StoredContexts, block_ids: list[int], stored: Stored) -> None:
        total, sizes = stored.offsets[-1, -1], stored.offsets.diff(dim=-1)
        runs = sizes.flip(1).flatten().cumsum(0).view(sizes.shape)
        starts = torch.cat([torch.zeros(1, dtype=runs.dtype), runs[:-1, -1]])[:, None]
        offsets = torch.cat([starts, runs], dim=1).to(torch.int32)
        assert offsets[-1, -1] == total
        put(self, block_ids, stored._replace(offsets=offsets))

    patch.setattr(StoredContexts, "_put", put_others)


def leave_the_offsets_of_whoever_had_the_blocks_before(patch: pytest.MonkeyPatch) -> None:
    put = StoredContexts._put

    def put_pages(self: StoredContexts, block_ids: list[int], stored: Stored) -> None:
        before = self._state.offsets[block_ids[0]].clone()
        put(self, block_ids, stored._replace(offsets=before))

    patch.setattr(StoredContexts, "_put", put_pages)


def give_blocks_back_while_they_are_filled(patch: pytest.MonkeyPatch) -> None:
    begin = ContextLoads._begin

    def begin_and_free(self: ContextLoads, *args: Any) -> bool:
        has_begun = begin(self, *args)
        if has_begun:
            load = self._pending[self._num_loads]
            self._pool.free_blocks(load.blocks)
            load.blocks = []
        return has_begun

    patch.setattr(ContextLoads, "_begin", begin_and_free)
    patch.setattr(ContextLoads, "finish", lambda *_: None)


def store_what_is_packed_next_to_it(patch: pytest.MonkeyPatch) -> None:
    places = StoredContexts._places

    def shifted(self: StoredContexts, block_ids: list[int]) -> torch.Tensor:
        found = places(self, block_ids)
        return found.roll(1) if len(block_ids) > 1 else found

    save = StoredContexts.save

    def save_shifted(self: StoredContexts, made: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(StoredContexts, "_places", shifted)
            save(self, made)

    patch.setattr(StoredContexts, "save", save_shifted)


def forget_no_load_of_who_leaves(patch: pytest.MonkeyPatch) -> None:
    forget = ContextLoads.forget

    def forget_the_name(self: ContextLoads, request_id: str) -> None:
        pending, self._pending = self._pending, {}
        forget(self, request_id)
        self._pending = pending

    patch.setattr(ContextLoads, "forget", forget_the_name)


def leave_the_method_out_of_the_name(patch: pytest.MonkeyPatch) -> None:
    settings = stored_names.settings_of_the_choice
    patch.setattr(stored_names, "settings_of_the_choice", lambda *a: settings(*a, "method"))


def leave_tokens_out_of_the_name(patch: pytest.MonkeyPatch) -> None:
    by_length: dict[int, str] = {}

    def name(request: Any, plan: Any, identity: Any) -> str:
        cut = plan.context_cut
        return by_length.setdefault(hash((plan.settings.method, cut)), f"{len(by_length):064x}")

    patch.setattr(scheduler_loads, "stored_name", name)


MUTANTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    find_a_context_a_step_early,
    find_a_context_before_it_is_read_without_holding_its_blocks,
    take_what_failed,
    keep_writing_to_blocks_that_were_given_back,
    take_half_a_file,
    take_the_blocks_in_another_order,
    take_the_offsets_of_another_rank,
    leave_the_offsets_of_whoever_had_the_blocks_before,
    give_blocks_back_while_they_are_filled,
    store_what_is_packed_next_to_it,
    forget_no_load_of_who_leaves,
    leave_the_method_out_of_the_name,
    leave_tokens_out_of_the_name,
)


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    errors = (IntegrityError, LostError, WrongEntryError, AssertionError, ValueError)
    with pytest.raises(errors):
        _serve_all(NUM_SERVERS, Counter())
