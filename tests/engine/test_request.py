"""What a worker remembers of its requests, from vLLM's own messages."""

import weakref
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.step.request import LiveRequests, Phase, Request
from vllm_kvselect.engine.step.seen_queries import SeenQueries, SeenQuery
from vllm_kvselect.retention import cuts
from vllm_kvselect.scoring.inputs import ScoringInputs

BLOCK_SIZE = 32
SERVER = EvictionConfig(budget=128, allow_override=("method", "budget"))


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


def resumed(name: str) -> CachedRequestData:
    cached = CachedRequestData.make_empty()
    cached.resumed_req_ids.add(name)
    return cached


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
        assert (live[name].cut,) == cuts(500, BLOCK_SIZE, EvictionConfig(budget=budget))
    assert live["c"].cut is live["d"].cut is None
    assert [live[name].num_prompt_tokens for name in "abcd"] == [500] * 4


def test_a_request_is_forgotten_when_it_ends() -> None:
    live = LiveRequests(SERVER, BLOCK_SIZE)
    live.update(message(("a", 500, None), ("b", 400, None)))
    live.update(message(("a", 300, None), finished_req_ids={"a", "unknown"}))
    assert live["a"].num_prompt_tokens == 300  # another request with the same id
    live.update(message(finished_req_ids={"a", "b"}))
    assert len(live) == 0


@pytest.mark.parametrize(
    "pause", [{"preempted_req_ids": {"a"}}, {"scheduled_cached_reqs": resumed("a")}]
)
def test_a_pause_forgets_what_was_packed_and_summed(pause: dict[str, Any]) -> None:
    live = LiveRequests(SERVER, BLOCK_SIZE)
    live.update(message(("a", 500, None), ("b", 300, None), ("c", 60, None)))
    assert live.num_saved_blocks == 0
    a, b = (cuts(n, BLOCK_SIZE, SERVER).num_freed(n) for n in (500, 300))
    for name in "abc":
        live[name].phase = Phase.PACKED
    for name in "ab":
        live[name].observed_by(num_layers=1)
    assert live.num_saved_blocks == a + b
    live.update(message(**pause))
    assert live.num_saved_blocks == b
    assert live["b"].observer is not None
    before = live["a"]
    assert before.observer is None
    assert [live[name].phase for name in "ab"] == [Phase.PREFILLING, Phase.PACKED]
    live.update(message(("a", 500, None)))  # as the second model runner resumes it
    assert live["a"] is before
    live.update(message(finished_req_ids={"b"}))
    assert live.num_saved_blocks == 0


def test_what_aborted_prefills_have_shown_ends_with_them() -> None:
    """Eighty prompts whose windows are half seen, none of which is ever completed."""
    live, seen = LiveRequests(SERVER, BLOCK_SIZE), []
    for index in range(80):
        live.update(message((f"r{index}", 500, None), finished_req_ids={f"r{index - 1}"}))
        observer = live[f"r{index}"].observed_by(num_layers=2)
        query = torch.zeros(5, 4, 16)
        inputs = ScoringInputs(query, query, query, 1.0)
        observer.observe(inputs, observer.first_position)
        seen.append(weakref.ref(observer))
    del observer
    assert [reference() is not None for reference in seen] == [False] * 79 + [True]


@pytest.mark.parametrize(("method", "first"), [("snapkv", 196), ("h2o", 100)])
def test_sums_need_the_queries_of_all_tokens_and_do_not_let_them_pile_up(
    method: str, first: int
) -> None:
    eviction = EvictionConfig(method=method, budget=1.0, decode_budget=128)
    request = Request.planned(100, BLOCK_SIZE, eviction, 500)
    assert request.cut is None
    assert request.num_observed == (100 if method == "h2o" else 0)
    assert request.first_seen(request.cuts[0]) == first
    query = SeenQuery(SeenQueries(slice(None), 1), 0)
    request.num_computed = 132
    request.seen = dict.fromkeys(range(100, 131), query)
    assert not request.is_behind
    request.seen[131] = query
    assert request.is_behind == (method == "h2o")
    request.num_computed = request.cuts[0].position  # the round adds them up itself
    assert not request.is_behind
    assert Request.planned(100, BLOCK_SIZE, eviction, 50).num_observed == 0  # without a round


def test_rounds_are_due_when_what_comes_before_them_is_computed() -> None:
    live = LiveRequests(EvictionConfig(budget=1.0, decode_budget=128), BLOCK_SIZE)
    new = message(("a", 100, None))
    new.scheduled_new_reqs[0].sampling_params = SamplingParams(max_tokens=500)
    live.update(new)
    request = live["a"]
    assert request.cut is None
    # 228 tokens hold less than a block more than the budget takes in whole blocks.
    assert [cut.position for cut in request.cuts] == [228, 356, 484]

    def step(num_computed: int, *resumed: str) -> None:
        cached = CachedRequestData.make_empty()
        cached.req_ids, cached.num_computed_tokens = ["a"], [num_computed]
        cached.resumed_req_ids.update(resumed)
        live.update(message(scheduled_cached_reqs=cached))

    step(227)
    assert request.due_round is None
    assert request.next_round == request.cuts[0]
    step(228)
    assert request.due_round == request.cuts[0]
    request.make_round(request.cuts[0])
    assert request.due_round is None
    assert request.phase is Phase.PACKED
    assert request.next_round == request.cuts[1]
    assert request.num_saved_blocks == request.cuts[0].first_packed
    step(0, "a")
    assert request.cut is request.due_round is None
    assert request.num_saved_blocks == 0
    step(228)
    assert request.due_round == request.cuts[0]
