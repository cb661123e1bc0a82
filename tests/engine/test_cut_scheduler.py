"""Chunks end at cuts, and with sparse segments; nobody else's are cut."""

from typing import Any

import pytest

from tests.engine.simulated_server import Server, Settings
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.scheduler.cut_scheduler import CutAsyncScheduler, CutScheduler
from vllm_kvselect.planning import plan as plan_module
from vllm_kvselect.planning.cuts import Cut, Cuts

PROMPT = [*range(100)]


class RecordingServer(Server):
    """A server that notes the chunks `(first token, length)` of its first request."""

    def __init__(self, method: str, **settings: Any) -> None:
        eviction = EvictionConfig.parse({"method": method, "budget": 20, "window": 4})
        is_async = settings.get("async_scheduling", False)
        scheduler_class = CutAsyncScheduler if is_async else CutScheduler
        super().__init__(Settings(eviction=eviction, **settings), scheduler_class=scheduler_class)
        self.chunks: list[tuple[int, int]] = []

    def check(self, output: Any, names: Any) -> None:
        super().check(output, names)
        if num_tokens := output.num_scheduled_tokens.get("r1"):
            end = self.scheduler.requests["r1"].num_computed_tokens
            self.chunks.append((end - num_tokens, num_tokens))

    def resume(self) -> list[tuple[int, int]]:
        """Chunks after the only request was preempted in mid-answer."""
        self.add(PROMPT, 30)
        for _ in range(10):
            self.step()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.chunks.clear()
        self.drain()
        return self.chunks


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", ["layer-keydiff", "adakv"])
def test_a_chunk_ends_with_its_prompt(method: str, async_scheduling: bool) -> None:
    server = RecordingServer(method, async_scheduling=async_scheduling)
    chunks = server.resume()
    assert 100 in {start + length for start, length in chunks}
    # What was generated before comes at once, in the next step.
    generated = dict(chunks)[100]
    assert generated > 1
    assert all(length == 1 for start, length in chunks if start > 100)


def test_a_chunk_ends_at_every_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Cuts([Cut(41, 3, 2, 5), Cut(80, 10, 3, 13)])
    monkeypatch.setattr(plan_module, "cuts", lambda *_: several)
    server = RecordingServer("layer-keydiff", max_num_seqs=1)
    server.add(PROMPT, 30)
    scheduled = [server.scheduler.schedule().num_scheduled_tokens for _ in range(3)]
    assert scheduled == [{"r1": 41}, {"r1": 39}, {"r1": 20}]


@pytest.mark.parametrize("in_graph", [1, 4])
def test_no_token_that_a_cut_looks_through_comes_alone(in_graph: int) -> None:
    """A step of so few tokens a row may run as a graph, where nobody sees the queries."""
    for num_batched in range(2 * in_graph + 1, 25):
        server = RecordingServer("adakv", max_num_batched_tokens=num_batched)
        server.scheduler._tokens_in_graph = in_graph
        server.add(PROMPT, 30)
        server.drain()
        seen = [length for start, length in server.chunks if 96 < start + length <= 100]
        assert min(seen) > in_graph
        assert sum(length for start, length in server.chunks if start < 100) == 100


def test_a_prompt_that_drops_nothing_is_vllms() -> None:
    server = RecordingServer("layer-keydiff")
    server.add(PROMPT[:20], 30)
    for _ in range(10):
        server.step()
    server.scheduler.reset_prefix_cache(reset_running_requests=True)
    server.chunks.clear()
    server.drain()
    assert server.chunks[0][1] > 20


SPARSE = {
    "method": "none",
    "prefill": "critiprefill",
    "prefill_segment": 16,
    "prefill_block": 4,
    "prefill_budget": 8,
    "prefill_dense_until": 32,
    "window": 4,
}


def chunks_of_a_sparse_prompt(server: Server) -> list[int]:
    """Where the chunks of a prompt of 100 tokens end: sparse from 32 to 96."""
    ends = []
    while (request := server.scheduler.requests["r1"]).num_computed_tokens < 100:
        server.step()
        ends.append(request.num_computed_tokens)
    return ends


@pytest.mark.parametrize(
    ("num_batched", "expected"),
    [(200, [100]), (70, [64, 100]), (37, [32, 64, 100]), (25, [25, 48, 64, 80, 100])],
)
def test_a_chunk_ends_with_a_sparse_segment(num_batched: int, expected: list[int]) -> None:
    settings = Settings(eviction=EvictionConfig.parse(SPARSE), max_num_batched_tokens=num_batched)
    server = Server(settings, scheduler_class=CutScheduler)
    server.add(PROMPT, 3)
    assert chunks_of_a_sparse_prompt(server) == expected
    server.drain()


def test_a_segment_that_does_not_fit_beside_others_waits() -> None:
    settings = Settings(eviction=EvictionConfig.parse(SPARSE), max_num_batched_tokens=24)
    server = Server(settings, scheduler_class=CutScheduler)
    server.add(PROMPT, 3)
    server.add(PROMPT[:40], 3)
    ends = chunks_of_a_sparse_prompt(server)
    assert set(range(32, 97)) & set(ends) <= set(range(32, 97, 16))
    server.drain()
