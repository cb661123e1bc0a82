import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from json import dumps

import pytest

from tests.evaluation.stand_in import BLOCK_SIZE, StandIn, standing_in
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation import cut_check
from vllm_kvselect.evaluation.cut_check import CutCheck
from vllm_kvselect.offline.errors import EvaluationError

SMALL = EvictionConfig(method="snapkv", budget=128)
FULL = EvictionConfig(method="none")
PROMPT_LEN = 1000
OTHER_BLOCKS = r"\(27 blocks\) where 1 prompts \(2[0-6] blocks\)"
DUE = r"1 prompts \(27 blocks\) to 2 prompts \(54 blocks\) were due"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_check, "_SECONDS", 0.3)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with standing_in(StandIn()) as found:
        yield found


def ask(server: StandIn, num_prompt_tokens: int = PROMPT_LEN, max_tokens: int = 8) -> None:
    xargs = {"kv_eviction": SMALL.method, "kv_eviction_budget": SMALL.budget}
    body = {"prompt": [1] * num_prompt_tokens, "max_tokens": max_tokens, "vllm_xargs": xargs}
    request = urllib.request.Request(f"{server.url}/v1/completions", dumps(body).encode())
    urllib.request.urlopen(request, timeout=10).close()


def test_what_was_due_and_was_dropped_is_right(server: StandIn) -> None:
    check = CutCheck(server.url)
    assert check.block_size == BLOCK_SIZE
    for num_prompt_tokens in (PROMPT_LEN, 500, 100):  # the last one fits the budget
        ask(server, num_prompt_tokens)
        check.note(num_prompt_tokens, 3, SMALL)
        check.check()
    assert server.num_evicted == 2


def test_only_what_the_server_did_meanwhile_counts(server: StandIn) -> None:
    ask(server)
    check = CutCheck(server.url)
    ask(server)
    check.note(PROMPT_LEN, 3, SMALL)
    check.check()


@pytest.mark.parametrize(
    ("noted", "drops", "message"),
    [
        ([(3, SMALL)], False, r"0 prompts \(0 blocks\) where 1 prompts \(27 bl"),
        ([(3, FULL)], True, r"of 1 prompts \(27 blocks\) where 0 prompts"),
        ([(3, SMALL.model_copy(update={"budget": 256}))], True, OTHER_BLOCKS),
        ([(3, SMALL.model_copy(update={"window": 128}))], True, OTHER_BLOCKS),
        # An answer of one token may end before anything is dropped, one of two does not.
        ([(1, SMALL)], True, None),
        ([(1, SMALL)], False, None),
        ([(1, SMALL), (2, SMALL)], False, rf"of 0 prompts \(0 blocks\) where {DUE}"),
    ],
    ids=["no-drop", "full-cache", "budget", "window", "one-token", "ends-before", "two-tokens"],
)
def test_what_was_dropped_is_what_was_due(
    noted: list[tuple[int, EvictionConfig]], drops: bool, message: str | None, server: StandIn
) -> None:
    server.drops = drops
    check = CutCheck(server.url)
    for num_tokens, config in noted:
        ask(server)
        check.note(PROMPT_LEN, num_tokens, config)
    with pytest.raises(EvaluationError, match=message) if message else nullcontext():
        check.check()


def test_as_many_blocks_of_fewer_prompts_are_not_the_same(server: StandIn) -> None:
    check = CutCheck(server.url)
    for num_prompt_tokens in (852, 100):  # 22 blocks, and none
        ask(server, num_prompt_tokens)
        check.note(500, 3, SMALL)  # 11 blocks each
    with pytest.raises(EvaluationError, match=r"1 prompts \(22 blocks\) where 2 prompts \(22 bl"):
        check.check()


def test_others_on_the_server_make_it_unknown_whose_entries_were_dropped(server: StandIn) -> None:
    check = CutCheck(server.url)
    ask(server)
    ask(server, 100)
    check.note(PROMPT_LEN, 3, SMALL)
    with pytest.raises(EvaluationError, match="answered 2 requests, 1 of them for this evaluation"):
        check.check()


def test_stock_vllm_is_refused() -> None:
    with (
        standing_in(StandIn(eviction=None)) as server,
        pytest.raises(EvaluationError, match="runs without --kv-eviction: every method"),
    ):
        CutCheck(server.url)


def test_no_server_is_refused() -> None:
    with pytest.raises(EvaluationError, match="does not answer"):
        CutCheck("http://127.0.0.1:9")
