"""Rounds with the CUDA backends on CPU tensors, in the manner of `test_cuda_backend.py`.

Every step's outputs are those of the float64 oracle, which chooses again in each round.
"""

from functools import partial
from typing import Any

import pytest
import torch

from tests.engine.cuda_layers import WIDE, Layers
from tests.engine.cuda_requests import MAX_NUM_SEQS, Request
from tests.engine.test_cuda_backend import (  # noqa: F401 (fixtures)
    FLASH,
    STOCK,
    TRITON,
    Replays,
    fp8_as_on_a_card,
    make_layers,
    stand_ins,
    warmed_up,
)
from tests.kernels.unsynchronised import unsynchronised
from vllm_kvselect.engine.step.split import Split
from vllm_kvselect.registry import METHODS

pytest.importorskip("triton")
from vllm_kvselect.kernels import cuda

INTERVAL = 20
"""No multiple of a block: rounds come at all places in one."""
ROUNDS = {"decode_budget": 40, "decode_interval": INTERVAL}
IN_PROMPTS = {"prompt_interval": 32}
METHODS_IN_ROUNDS = [name for name, method in METHODS.items() if method.in_rounds]


def three(layers: Layers, num_generated: int = 90) -> tuple[Request, Request, Request]:
    """Requests that are cut at their prompts' ends, or in rounds only."""
    long, short, chunked = (layers.request(n, n + num_generated) for n in (70, 20, 65))
    assert long.prompt.next_cut.position == long.prompt.plan.num_prompt_tokens
    assert short.prompt.next_cut.position > short.prompt.plan.num_prompt_tokens
    assert all(len(request.prompt.plan.cuts) >= 3 for request in (long, short, chunked))
    return long, short, chunked


def decode(layers: Layers, *requests: Request, steps: int) -> None:
    for step in range(steps):
        turned = requests[step % len(requests) :] + requests[: step % len(requests)]
        layers.step(*((request, 1) for request in turned))


def one_round(layers: Layers) -> None:
    """A round of a request whose heads hold different numbers of entries, in little time."""
    request = layers.request(70, 70 + INTERVAL + 2)
    layers.step((request, 70))
    for _ in range(INTERVAL // 2):
        layers.step((request, 2))  # as when it resumes
    decode(layers, request, steps=2)
    assert len(request.retained) == 2


def steps_with_rounds(layers: Layers) -> None:
    """Rounds at different steps, alone and beside prefills, and again after a preemption."""
    long, short, chunked = three(layers)
    layers.step((long, 70), (short, 20))
    decode(layers, long, short, steps=INTERVAL)
    layers.step((short, 1), (long, 1), (chunked, 60))  # a round beside a chunk
    layers.step((chunked, 5), (long, 1), (short, 1))
    decode(layers, long, short, chunked, steps=INTERVAL + 3)
    layers.preempt(long)
    decode(layers, short, chunked, steps=2)
    layers.step((chunked, 1), (long, 70), (short, 1))
    # What was generated is computed again, as far as the next round at a time.
    for _ in range(2):
        layers.step((chunked, 1), (long, INTERVAL), (short, 1))
    decode(layers, long, chunked, short, steps=INTERVAL)
    assert all(len(request.retained) >= 2 for request in (long, short, chunked))


def steps_with_cuts_in_prompts(layers: Layers) -> None:
    """Cuts in prompts beside each other's chunks and answers, and again after a preemption."""
    long, other = layers.request(130, 140), layers.request(110, 120)
    ends = [[cut.position for cut in each.prompt.plan.cuts] for each in (long, other)]
    assert ends == [[96, 128, 130], [96, 110]]
    layers.step((long, 50))
    layers.step((other, 96), (long, 46))  # both come to a cut
    layers.step((long, 28), (other, 10))
    layers.step((other, 4), (long, 4))
    layers.preempt(long)
    layers.step((other, 1))
    layers.step((long, 96), (other, 1))
    layers.step((other, 1), (long, 32))
    layers.step((other, 1), (long, 2))
    decode(layers, other, long, steps=3)
    assert [sorted(each.retained) for each in (long, other)] == ends


@pytest.mark.parametrize("method", METHODS_IN_ROUNDS)
def test_every_step_is_that_of_the_oracle(method: str) -> None:
    steps_with_rounds(make_layers(FLASH, method, WIDE, **ROUNDS))


@pytest.mark.parametrize("method", METHODS_IN_ROUNDS)
def test_every_step_of_a_prompt_with_cuts_is_that_of_the_oracle(method: str) -> None:
    steps_with_cuts_in_prompts(make_layers(FLASH, method, WIDE, **IN_PROMPTS))


@pytest.mark.parametrize("method", ["adakv-perturb", "layer-probe"])
def test_the_same_with_triton(method: str) -> None:
    steps_with_cuts_in_prompts(make_layers(TRITON, method, WIDE, **IN_PROMPTS))


@pytest.mark.parametrize("method", ["adakv-perturb", "thetakv", "r-kv"])
def test_sinks_count_in_rounds(method: str) -> None:
    steps_with_rounds(make_layers(FLASH, method, WIDE, with_sinks=True, **ROUNDS))


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        ("adakv-perturb", FLASH),
        ("thetakv", FLASH),
        ("adakv-perturb", TRITON),
        ("layer-probe", FLASH),
    ],
)
def test_every_step_is_that_of_the_oracle_with_the_kernels(method: str, backend: Any) -> None:
    one_round(make_layers(backend, method, cuda.KERNELS, **ROUNDS))


@pytest.mark.usefixtures("fp8_as_on_a_card")
@pytest.mark.parametrize(("backend", "with_queries"), [(FLASH, True), (TRITON, False)])
def test_an_fp8_cache_is_scored_and_moved_as_attention_reads_it(
    backend: Any, with_queries: bool
) -> None:
    layers = make_layers(backend, kernels=WIDE, kv_cache_dtype="fp8", **ROUNDS)
    assert (layers.layers[0].query_quant is not None) is with_queries
    one_round(layers)


def test_queries_of_graphs_are_seen_and_rounds_change_what_they_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = make_layers(FLASH, kernels=WIDE, graphs=True, **ROUNDS)
    long, short, chunked = three(layers)
    replays = Replays(FLASH, layers, MAX_NUM_SEQS, monkeypatch)
    layers.step((long, 70), (short, 20))
    calls = []
    for step in range(2 * INTERVAL):
        if step == INTERVAL // 2:  # outside graphs, some of the queries
            layers.step((chunked, 65), (short, 1), (long, 1))
        rows = [long, short, chunked] if step > INTERVAL // 2 else [short, long]
        replays.step(*((request, 1) for request in rows[step % 2 :] + rows[: step % 2]))
        calls.append(list(replays.calls))
    assert all(call == calls[0] for call in calls)  # the same tensors, as a graph has them
    assert (len(long.retained), len(short.retained)) == (3, 1)


def test_a_request_that_has_dropped_nothing_is_vllms_but_for_its_queries() -> None:
    layers = make_layers(FLASH, "snapkv", **ROUNDS)
    short = layers.request(20, 90)
    layers.step((short, 20))
    first = short.prompt.plan.cuts[0].position
    for position in range(20, first):
        metadata = layers.step((short, 1))
        if position < first - layers.eviction.window:
            assert isinstance(metadata, STOCK[FLASH])
        else:
            assert isinstance(metadata, Split)
            assert [part.tokens for part in metadata.stock_parts] == [None]
    assert not layers.step((short, 1)).stock_parts


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("method", ["adakv-perturb", "layer-keydiff"])
def test_rounds_do_not_wait_for_the_device(method: str, graphs: bool) -> None:
    layers = make_layers(FLASH, method, cuda.KERNELS, graphs=graphs, **ROUNDS)
    long, short, _ = three(layers)
    layers.step((long, 70), (short, 20))
    for _ in range(INTERVAL + 1):
        rows = ((long, 1), (short, 1))
        common = layers.common(rows)
        # What has arrived long ago may be read.
        runs = [each.prompt.progress.longest_run for each, _ in rows]
        arrived = [run.on_host for run in runs if run is not None]
        layers.make_rounds(rows, partial(unsynchronised, *arrived))
        with unsynchronised(*layers.on_host):
            metadata = layers.builder.build(0, common)
        layers.check(rows, layers.forward(rows, common, metadata, guard=unsynchronised))
    assert len(long.retained) == 2


@pytest.mark.parametrize("cuts", [ROUNDS, IN_PROMPTS], ids=["", "cuts in prompts"])
@pytest.mark.parametrize("method", ["adakv-perturb", "thetakv", "r-kv", "knorm", "layer-probe"])
def test_warming_up_launches_what_rounds_need_and_leaves_no_trace(
    method: str, cuts: dict[str, int]
) -> None:
    layers, warm, launched = warmed_up(method, WIDE, **cuts)
    first = 70 if cuts == ROUNDS else 96
    request = layers.request(first if cuts == ROUNDS else 110, 120)
    layers.step((request, first))
    before_rounds = set(launched)
    decode(layers, request, steps=INTERVAL + 1)
    assert len(request.retained) == 2
    assert launched == warm >= before_rounds


def test_a_preempted_request_forgets_the_queries_of_a_graph() -> None:
    layers = make_layers(FLASH, "snapkv", graphs=True, **ROUNDS)
    request, other = layers.request(70, 120), layers.request(20, 60)
    layers.step((request, 70), (other, 20))
    decode(layers, request, steps=INTERVAL - 1)
    queries, end = request.prompt.progress.queries, 70 + INTERVAL - 1
    layers.preempt(request)
    decode(layers, other, steps=1)
    with pytest.raises(LookupError):
        request.prompt.progress.queries.between(end - 1, end)
    # The graph's buffer was overwritten: what was taken out of it is still there.
    begin = end - layers.eviction.window + 1
    expected = request.query[:, begin:end]
    kept = torch.cat(queries.between(begin, end), dim=1)
    torch.testing.assert_close(kept, expected)


def test_queries_of_steps_padded_beyond_the_most_requests_are_seen() -> None:
    """Where capture sizes leave `max_num_seqs` out, a step in pieces has more rows than that."""
    layers = make_layers(FLASH, kernels=WIDE, graphs=True, **ROUNDS)
    layers.builder.largest_full_graph = 2 * MAX_NUM_SEQS
    long, short, _ = three(layers)
    layers.step((long, 70), (short, 20))
    for _ in range(INTERVAL + 1):
        rows = ((long, 1), (short, 1))
        common = layers.common(rows)
        metadata = layers.build(rows, common)
        common.num_actual_tokens = 2 * MAX_NUM_SEQS  # of the queries, as the runner pads them
        layers.check(rows, layers.forward(rows, common, metadata))
    assert len(long.retained) == 2
