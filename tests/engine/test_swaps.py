"""Cuts of one step whose blocks others have just given back: a random machine misses these."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.engine.simulated_server import EVICTION, Server, Settings
from tests.engine.tagged_rows import WrongEntryError
from vllm_kvselect.engine.drop.due import DueDrops
from vllm_kvselect.engine.drop.request import LiveRequests, Request
from vllm_kvselect.engine.notice import StepNotice, Swap
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager, headwise_manager
from vllm_kvselect.engine.scheduler.cut_scheduler import CutScheduler

ALLOWED = {"allow_override": ("method", "budget", "context")}
CHOOSING = Settings(eviction=EVICTION.model_copy(update=ALLOWED), policy="priority")
"""A pool of 40 blocks of 4 tokens."""
STOCK = {"kv_eviction": "none"}


def serve(length: int, *budgets: int) -> list[Swap]:
    """Serves prompts that make their cuts in one step; what was swapped."""
    server, swaps = Server(CHOOSING), list[Swap]()
    for index, budget in enumerate(budgets):
        prompt = [*range(1000 * index, 1000 * index + length)]
        server.add(prompt, 5, extra_args={"kv_eviction_budget": budget})
    execute = server.worker.execute

    def noted(output: Any) -> Any:
        swaps.extend(StepNotice.of(output).swaps.values())
        return execute(output)

    server.worker.execute = noted  # type: ignore[method-assign]
    server.step()
    server.step()
    assert len(swaps) == len(budgets)
    server.drain()
    return swaps


def takes_from(taker: Swap, giver: Swap) -> bool:
    return bool({*taker.fresh} & {*giver.given_back})


def test_cuts_are_made_in_the_order_in_which_their_blocks_were_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = serve(70, 20, 24)
    assert takes_from(second, first)
    assert not takes_from(first, second)
    update = LiveRequests.update

    def reversed_update(self: LiveRequests, scheduled: Any) -> list[Request]:
        found = update(self, scheduled)
        self.due.reverse()
        return found

    monkeypatch.setattr(LiveRequests, "update", reversed_update)
    with pytest.raises(WrongEntryError):
        serve(70, 20, 24)


def test_a_cut_joins_no_pass_before_one_whose_blocks_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = serve(46, 20, 40, 20)
    assert takes_from(second, first)
    assert takes_from(third, second)

    def joined(self: DueDrops, due: Sequence[Request]) -> Iterator[list[Request]]:
        yield [due[0], *due[2:]]
        yield [*due[1:2]]

    monkeypatch.setattr(DueDrops, "_passes", joined)
    with pytest.raises(WrongEntryError):
        serve(46, 20, 40, 20)


def test_a_hit_ends_before_a_cut_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a context stands in the prefix cache, and is not compressed yet."""

    def serve_again() -> None:
        server = Server(CHOOSING)
        server.add([*range(40)], 2, extra_args={"kv_eviction_budget": 40})
        while server.unfinished:
            server.step()
        server.add([*range(50)], 5, extra_args={"kv_eviction_context": 40})
        server.drain()

    serve_again()
    monkeypatch.setattr(HeadwiseManager, "most_found", lambda *_: 40)
    with pytest.raises(LookupError, match="were not kept"):
        serve_again()


def preempt_in_its_own_step() -> None:
    """A request takes the last blocks for its cut, which one that matters more needs in that step.

    All that it gives back is held by another one with the same text.
    """
    server = Server(CHOOSING)
    server.add([*range(69)], 9, 1, STOCK)
    server.step()
    request_id = server.add([*range(70)], 5, 2)
    server.step(2)
    server.add([*range(2000, 2064)], 5, 0, STOCK)
    server.step()
    manager, swapped = headwise_manager(server.scheduler.kv_cache_manager), list[str]()
    allocate = manager.allocate_new_blocks

    def noted(*args: Any) -> Any:
        blocks = allocate(*args)
        swapped.extend(manager._swaps)
        return blocks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "allocate_new_blocks", noted)
        server.step()
    assert request_id in swapped
    assert server.scheduler.requests[request_id].num_preemptions == 1
    server.drain()


def tell_of_all_swaps(patch: pytest.MonkeyPatch) -> None:
    schedule, take_swaps = CutScheduler.schedule, HeadwiseManager.take_swaps

    def told(self: CutScheduler, *args: Any) -> Any:
        swaps: dict[str, Swap] = {}

        def take(manager: HeadwiseManager) -> dict[str, Swap]:
            swaps.update(take_swaps(manager))
            return swaps

        patch.setattr(HeadwiseManager, "take_swaps", take)
        scheduled = schedule(self, *args)
        if swaps:
            notice = StepNotice.of(scheduled)
            notice.swaps = swaps
            notice.add_to(scheduled)
        return scheduled

    patch.setattr(CutScheduler, "schedule", told)


def test_a_cut_of_a_request_that_does_not_run_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt_in_its_own_step()
    tell_of_all_swaps(monkeypatch)
    with pytest.raises(AssertionError, match="is not at a cut"):
        preempt_in_its_own_step()
