"""What a worker remembers of its requests, from vLLM's own messages."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from tests.plans import planned
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.drop.request import LiveRequests, Request
from vllm_kvselect.engine.notice import Found, StepNotice, Swap
from vllm_kvselect.planning.cuts import cuts

BLOCK_SIZE = 32
SERVER = EvictionConfig(method="adakv-perturb", budget=128, allow_override=("method", "budget"))


def message(*new: tuple[str, int, Any], **changes: Any) -> SchedulerOutput:
    """A step's message with new requests `(id, prompt length, extra_args)`."""
    requests = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[0] * length,
            mm_features=[],
            sampling_params=SamplingParams(extra_args=extra_args),
            pooling_params=None,
            block_ids=([],),
            num_computed_tokens=0,
            lora_request=None,
        )
        for name, length, extra_args in new
    ]
    scheduled = SchedulerOutput.make_empty()
    scheduled.scheduled_new_reqs = requests
    for field, value in changes.items():
        setattr(scheduled, field, value)
    return scheduled


def cached(num_computed: dict[str, int], *resumed: str) -> CachedRequestData:
    """What a step's message says of requests that are known: tokens computed, by name."""
    made = CachedRequestData.make_empty()
    made.req_ids, made.num_computed_tokens = [*num_computed], [*num_computed.values()]
    made.new_block_ids = [([],) if name in resumed else None for name in num_computed]
    made.resumed_req_ids.update(resumed)
    return made


def complete(request: Request) -> None:
    cut = request.next_cut
    assert cut is not None
    request.complete_cut(cut, None)


def test_each_prompt_has_the_cut_of_its_own_settings() -> None:
    live = LiveRequests(SERVER, BLOCK_SIZE)
    live.update(
        message(
            ("a", 500, None),
            ("b", 500, {"kv_eviction_budget": 256}),
            ("c", 500, {"kv_eviction": "none"}),
            ("d", 500, {"kv_eviction_budget": -1}),  # what the front end would have refused
        )
    )
    for name, budget in (("a", 128), ("b", 256)):
        assert live[name].plan.cuts == cuts(
            500, BLOCK_SIZE, EvictionConfig(method="adakv-perturb", budget=budget)
        )
        assert live[name].next_cut == live[name].plan.cuts[0]
    assert live["c"].next_cut is live["d"].next_cut is None
    assert [live[name].plan.num_prompt_tokens for name in "abcd"] == [500] * 4


def test_a_request_is_forgotten_when_it_ends() -> None:
    live = LiveRequests(SERVER, BLOCK_SIZE)
    live.update(message(("a", 500, None), ("b", 400, None)))
    live.update(message(("a", 300, None), finished_req_ids={"a", "unknown"}))
    assert live["a"].plan.num_prompt_tokens == 300  # another request with the same id
    live.update(message(finished_req_ids={"a", "b"}))
    assert len(live) == 0


@pytest.mark.parametrize(
    "pause",
    [{"preempted_req_ids": {"a"}}, {"scheduled_cached_reqs": cached({"a": 0}, "a")}],
    ids=["preempted", "resumed"],
)
def test_a_pause_puts_another_progress_in_the_place_of_the_old_one(pause: dict[str, Any]) -> None:
    live = LiveRequests(SERVER, BLOCK_SIZE)
    live.update(message(("a", 500, None), ("b", 300, None), ("c", 60, None)))
    assert live.num_saved_blocks == 0
    a, b = (cuts(n, BLOCK_SIZE, SERVER).num_freed(n) for n in (500, 300))
    for name in "ab":
        complete(live[name])
    assert live.num_saved_blocks == a + b
    before, kept = live["a"], live["b"].progress
    live.update(message(**pause))
    assert live.num_saved_blocks == b
    assert live["b"].progress is kept
    assert [live[name].progress.num_made for name in "ab"] == [0, 1]
    live.update(message(("a", 500, None)))  # as the second model runner resumes it
    assert live["a"] is before
    live.update(message(finished_req_ids={"b"}))
    assert live.num_saved_blocks == 0


@pytest.mark.parametrize("page_size", [None, 8])
def test_only_the_scheduler_says_that_a_state_was_found(page_size: int | None) -> None:
    config = EvictionConfig(method="adakv-perturb", budget=64, context=320)
    live = LiveRequests(config, BLOCK_SIZE, page_size)
    first = message(("a", 500, None), ("b", 500, None))
    for new in first.scheduled_new_reqs:
        new.num_computed_tokens = 320
    StepNotice(found={"a": Found(1, 7)}).add_to(first)
    begun, key = live.update(first), 7
    if page_size:
        per_block = BLOCK_SIZE // page_size
        key = 7 * per_block + live["a"].plan.cuts[0].first_packed % per_block
    assert begun == [(live["a"], key)]
    assert [live[name].progress.num_made for name in "ab"] == [1, 0]
    assert [live[name].progress.num_found for name in "ab"] == [320, 0]
    again = message(scheduled_cached_reqs=cached({"a": 0, "b": 320}, "a", "b"))
    StepNotice(found={"b": Found(1, 7)}).add_to(again)
    assert live.update(again) == [(live["b"], key)]
    assert [live[name].progress.num_made for name in "ab"] == [0, 1]


def test_new_plans_are_taken_once() -> None:
    live = LiveRequests(SERVER, BLOCK_SIZE)
    live.update(message(("a", 500, None), ("b", 500, None)))
    live.update(message(("c", 400, None), finished_req_ids={"b"}))
    taken = live.take_new_plans()
    assert taken == {name: live[name].plan.fingerprint for name in "ac"}
    assert taken["a"] != taken["c"]
    live.update(message(preempted_req_ids={"a"}))
    assert live.take_new_plans() == {}


@pytest.mark.parametrize(("method", "first"), [("snapkv", 196), ("layer-probe", 228)])
def test_what_remembers_numbers_looks_through_no_queries(method: str, first: int) -> None:
    eviction = EvictionConfig(method=method, budget=1.0, decode_budget=128)
    request = Request(planned(100, BLOCK_SIZE, eviction, 500))
    assert request.first_query(request.plan.cuts[0]) == first


def test_rounds_are_due_when_what_comes_before_them_is_computed() -> None:
    live = LiveRequests(
        EvictionConfig(method="adakv-perturb", budget=1.0, decode_budget=128), BLOCK_SIZE
    )
    new = message(("a", 100, None))
    new.scheduled_new_reqs[0].sampling_params = SamplingParams(max_tokens=500)
    live.update(new)
    request, planned_cuts = live["a"], live["a"].plan.cuts
    assert request.last_cut is None
    # 228 tokens hold less than a block more than the budget takes in whole blocks.
    assert [cut.position for cut in planned_cuts] == [228, 356, 484]

    def step(num_computed: int, *resumed: str) -> None:
        live.update(message(scheduled_cached_reqs=cached({"a": num_computed}, *resumed)))

    step(227)
    assert request.due_cut is None
    assert request.next_cut is planned_cuts[0]
    step(228)
    assert request.due_cut is planned_cuts[0]
    complete(request)
    assert request.due_cut is None
    assert request.last_cut is planned_cuts[0]
    assert request.next_cut is planned_cuts[1]
    assert request.num_saved_blocks == planned_cuts[0].first_packed
    live.update(message(preempted_req_ids={"a"}))
    assert request.due_cut is None  # it waits, and holds nothing
    step(0, "a")
    assert request.last_cut is request.due_cut is None
    assert request.num_saved_blocks == 0
    step(228)
    assert request.due_cut is planned_cuts[0]


@pytest.mark.parametrize("page_size", [32, 16])
def test_cuts_are_due_in_the_order_in_which_their_blocks_were_swapped(page_size: int) -> None:
    live = LiveRequests(SERVER, BLOCK_SIZE, page_size)
    live.update(message(("a", 500, None), ("b", 500, None), ("c", 60, None)))
    step = message(scheduled_cached_reqs=cached({"a": 500, "b": 500, "c": 60}))
    swaps = {
        "b": Swap([*range(1, 17)], [30, 31, 32, 33]),
        "a": Swap([*range(41, 57)], [4, 3, 2, 1]),
    }
    StepNotice(swaps).add_to(step)
    live.update(step)
    assert live.due == [live["b"], live["a"]]
    (cut,) = live["a"].plan.cuts
    parts = BLOCK_SIZE // page_size
    for name, swap in swaps.items():
        given_back, fresh = (
            [block * parts + part for block in blocks for part in range(parts)] for blocks in swap
        )
        assert live[name].progress.swap == Swap(given_back, fresh[-cut.num_packed :])
    live.update(message())
    assert live.due == []
