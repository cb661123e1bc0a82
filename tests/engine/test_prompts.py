"""What a worker remembers of its requests, from vLLM's own messages."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.prompts import LivePrompts
from vllm_kvselect.retention import cuts

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
    prompts = LivePrompts(SERVER, BLOCK_SIZE)
    prompts.update(
        message(
            ("a", 500, None),
            ("b", 500, {"kv_eviction_budget": 256}),
            ("c", 500, {"kv_eviction": "none"}),
            ("d", 500, {"kv_eviction_budget": -1}),  # what the front end would have refused
        )
    )
    for name, budget in (("a", 128), ("b", 256)):
        assert (prompts[name].cut,) == cuts(500, BLOCK_SIZE, EvictionConfig(budget=budget))
    assert prompts["c"].cut is prompts["d"].cut is None
    assert [prompts[name].num_tokens for name in "abcd"] == [500] * 4


def test_a_request_is_forgotten_when_it_ends() -> None:
    prompts = LivePrompts(SERVER, BLOCK_SIZE)
    prompts.update(message(("a", 500, None), ("b", 400, None)))
    prompts.update(message(("a", 300, None), finished_req_ids={"a", "unknown"}))
    assert prompts["a"].num_tokens == 300  # another request with the same id
    prompts.update(message(finished_req_ids={"a", "b"}))
    assert len(prompts) == 0


@pytest.mark.parametrize(
    "pause", [{"preempted_req_ids": {"a"}}, {"scheduled_cached_reqs": resumed("a")}]
)
def test_a_pause_forgets_what_was_packed_and_summed(pause: dict[str, Any]) -> None:
    prompts = LivePrompts(SERVER, BLOCK_SIZE)
    prompts.update(message(("a", 500, None), ("b", 300, None), ("c", 60, None)))
    assert prompts.num_saved_blocks == 0
    a, b = (cuts(n, BLOCK_SIZE, SERVER).num_freed(n) for n in (500, 300))
    for name in "abc":
        prompts[name].is_packed = True
        prompts[name].packing.append(lambda: None)
    prompts["a"].sums = prompts["b"].sums = torch.zeros(1)
    assert prompts.num_saved_blocks == a + b
    prompts.update(message(**pause))
    assert prompts.num_saved_blocks == b
    assert prompts["b"].sums is not None
    before = prompts["a"]
    assert before.sums is None
    assert [len(prompts[name].packing) for name in "abc"] == [0, 1, 1]
    prompts.update(message(("a", 500, None)))  # as the second model runner resumes it
    assert prompts["a"] is before
    prompts.update(message(finished_req_ids={"b"}))
    assert prompts.num_saved_blocks == 0
