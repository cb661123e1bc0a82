"""The state machine finds nothing in 10,000 scheduling steps; what it once found stays found."""

from collections import Counter

import pytest
from hypothesis import Phase
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from tests.engine.machine import CHOICES, quiet, run  # noqa: F401 (fixture)
from tests.engine.simulated_server import EVICTION, IntegrityError, LostError, Server, Settings
from tests.engine.tagged_rows import WrongEntryError
from vllm_kvselect.config import OVERRIDE_NAMES, EvictionConfig
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager
from vllm_kvselect.engine.states.names import StateNames
from vllm_kvselect.request import REQUEST_KEYS

NUM_STEPS = 10_000


def test_priority_preemption_leaves_no_hash_of_blocks_that_were_never_computed() -> None:
    # vLLM hashes blocks when it schedules them. When r2 needs a block in the same step, r1 is
    # preempted before its blocks are computed; soon after, it finds them by their hashes.
    settings = Settings(long_prefill_token_threshold=12, policy="priority")
    for num_output in range(1, 12):
        server = Server(settings)
        server.add([*range(1000, 1150)], 20, priority=2)
        server.step(100)
        server.add([*range(5000, 5027)], num_output, priority=0)
        server.drain()


def compress_again_what_is_half_gone() -> Server:
    """One of a context's packed blocks has gone, and then it is compressed and read once more."""
    every = EvictionConfig(method="adakv", budget=20, window=4, allow_override=OVERRIDE_NAMES)
    server = Server(Settings(num_spare_blocks=30, eviction=every), seen=Counter())
    (manager,) = server.scheduler.kv_cache_manager.coordinator.single_type_managers
    for question in (1, 2, 3):
        server.add([*range(1000, 1064), question], 3, 0, {"kv_eviction_context": 64})
        while server.unfinished:
            server.step()
        if question == 1:
            ((first, (_, last_packed, _)),) = manager.names._given.items()
            manager.block_pool.evict_blocks({manager.names._cached(last_packed).block_id})
            assert manager.names._cached(first)
    server.drain()
    return server


def test_half_a_context_is_compressed_anew() -> None:
    assert compress_again_what_is_half_gone().worker.num_states_found == 1


def test_two_halves_of_a_context_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateNames, "_forget_packed", lambda *_: None)
    with pytest.raises((IntegrityError, WrongEntryError), match=r"hashes|wrong entries"):
        compress_again_what_is_half_gone()


def preempt_where_a_context_would_be_packed() -> int:
    """A request goes in the very step whose beginning would have packed its context.

    Returns:
        How often that was seen.
    """
    every = EvictionConfig(
        method="adakv", budget=20, window=4, allow_override=("method", "budget", "context")
    )
    context, marked, num_seen = [*range(1000, 1064)], {"kv_eviction_context": 64}, 0
    for length in range(130, 151):  # of what takes all blocks, or all but a few
        server = Server(Settings(eviction=every, policy="priority"))
        server.add([*context, 1], 3, 2, marked)
        server.step(24)
        server.add([*range(5000, 5000 + length)], 1, 0, {"kv_eviction": "none"})
        server.step(48)
        server.add([*context, 2], 3, 1, marked)
        server.step(200)
        num_seen += server.scheduler.requests["r1"].num_preemptions
        server.drain()
    return num_seen


def test_a_context_whose_step_is_not_computed_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preempt_where_a_context_would_be_packed()
    monkeypatch.setattr(StateNames, "take_back", lambda *_: None)
    with pytest.raises(WrongEntryError, match="another state"):
        preempt_where_a_context_would_be_packed()


def test_only_what_was_announced_is_said_to_be_gone() -> None:
    eviction = EVICTION.model_copy(update={"prompt_interval": 16})
    server = Server(Settings(eviction=eviction, num_spare_blocks=8, announces=True))
    batches: list[KVEventBatch] = []
    server.scheduler.kv_event_publisher.publish = batches.append
    for number in range(12):
        server.add([*range(100 * (number % 4), 100 * (number % 4) + 90 + number)], 3)
        while server.unfinished:
            server.step()
    there, num_gone = set(), 0
    for event in (each for batch in batches for each in batch.events):
        if isinstance(event, BlockStored):
            there |= {*event.block_hashes}
        else:
            assert there.issuperset(event.block_hashes)
            num_gone += 1
    assert num_gone
    assert server.worker.num_states_found


def serve_what_is_longer_than_the_pool() -> None:
    bounds = {"prompt_interval": 16, "decode_budget": 20, "decode_interval": 12}
    eviction = EvictionConfig(method="adakv", budget=20, window=4, **bounds)
    settings = Settings(eviction=eviction, scheduler_reserve_full_isl=True)
    server = Server(settings)
    assert (settings.num_blocks - 1) * settings.block_size < 120
    for number in range(1, 4):
        server.add([*range(1000 * number, 1000 * number + 120)], 30)
    server.drain()


def test_a_prompt_is_admitted_by_what_it_holds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_what_is_longer_than_the_pool()
    monkeypatch.delattr(HeadwiseManager, "get_num_blocks_to_allocate")  # by its length, as vLLM
    with pytest.raises(LostError, match="nothing runs"):
        serve_what_is_longer_than_the_pool()


def test_requests_ask_for_all_that_they_may() -> None:
    assert CHOICES.keys() == REQUEST_KEYS.keys()


def test_ten_thousand_steps(request: pytest.FixtureRequest) -> None:
    seen: Counter[str] = Counter()
    # A failure is shown at once, as it was drawn; `--machine-steps` looks for the smallest.
    run(160, seen, derandomize=True, phases=(Phase.generate,))
    assert seen["steps"] >= NUM_STEPS
    for reached in (
        "preempted",
        "windows in several chunks",
        "pools packed",
        "requests cut together",
        "hits up to the cap",
        "different settings in a batch",
        "rounds",
        "cuts in prompts",
        "pools smaller than a request",
        "states found",
        "states found and more",
        "states cut again",
        "sparse segments",
        "hits in sparse parts",
        "read beside",
        "pages of larger blocks packed",
        "scores kept",
        "settings refused",
        "aborted",
        "finished: stop",
        "finished: length",
        "resets",
    ):
        assert seen[reached], (reached, seen)
    while seen["steps"] < request.config.getoption("--machine-steps"):
        run(500, seen)
