"""Sparse prefills in real engines: a float64 model's word on every chosen block and every token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Answer, Engine, EngineFactory, every_architecture, preempting_all
from tests.engine.float64_model import Model
from tests.engine.float64_prefill import BLOCK, BUDGET, SIZE, Chosen, Exact, recording_blocks
from tests.engine.random_models import random_prompts
from vllm_kvselect.engine.sparse import worker_segments

pytestmark = pytest.mark.xdist_group("sparse_prefill")
SPARSE = {
    "prefill": "critiprefill",
    "prefill_segment": SIZE,
    "prefill_block": BLOCK,
    "prefill_budget": BUDGET,
    "prefill_dense_until": 2 * SIZE,
}
ALONE = {"method": "none", **SPARSE}
# Their last sparse segments end at different positions; one has none.
PROMPTS = random_prompts([150, 333, 406, 480, 600])
NUM_GENERATED = 20


def end_of(prompt: Sequence[int]) -> int:
    """Where the sparse segments of a prompt end."""
    return (len(prompt) - 32) // SIZE * SIZE


def check(model: Path, answers: Sequence[Answer], blocks: Chosen, **rule: Any) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        exact = Exact(Model(model), prompt, blocks.get(end_of(prompt), {}))
        exact.check(answer)
        if len(prompt) > 200:
            exact.check_blocks(**rule)


@every_architecture
def test_blocks_and_tokens_are_as_the_float64_model_says(
    start: EngineFactory, random_model: Path
) -> None:
    settings = {**ALONE, "check_integrity": True}
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    with start(settings, 90, **sizes) as engine, recording_blocks() as blocks:
        answers = engine.generate(PROMPTS, NUM_GENERATED)
    assert len(blocks) == len(PROMPTS) - 1
    check(random_model, answers, blocks)


def answers_of(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Answer]:
    return engine.generate_alone(prompts, NUM_GENERATED)


def test_neither_chunks_nor_preemption_change_the_choice(start: EngineFactory) -> None:
    made, found = [], []
    for num_batched in (SIZE + 7, 200, 1024):
        with (
            start(ALONE, 90, max_num_batched_tokens=num_batched, max_num_seqs=6) as engine,
            recording_blocks() as blocks,
        ):
            found.append(engine.generate(PROMPTS, NUM_GENERATED))
            with preempting_all(3) as preempted:
                assert engine.generate(PROMPTS, NUM_GENERATED) == found[-1]
            assert preempted
        made.append(blocks)
    assert made[0] == made[1] == made[2]
    assert found[0] == found[1] == found[2]


def test_segments_that_read_everything_give_stocks_tokens(
    start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(None, 90) as engine:
        stock = answers_of(engine)
    with start(ALONE, 90) as engine:
        some = answers_of(engine)
        chosen = worker_segments.most_critical
        monkeypatch.setattr(
            worker_segments, "most_critical", lambda c, before, _: chosen(c, before, 10**6)
        )
        engine.scheduler.reset_prefix_cache()
        every = answers_of(engine)
    assert every == stock
    assert some[-1] != stock[-1]


def test_blocks_are_found_by_those_who_would_compute_the_same(start: EngineFactory) -> None:
    prompt = PROMPTS[-1]  # sparse from 128 to 512
    other = [*prompt[:300], *prompt[:300]]  # leaves it inside a segment
    asked: list[tuple[list[int], dict[str, Any] | None]] = [
        *[(prompt, None), (prompt, None), ([*prompt, *other[:300]], None), (other, None)],
        *[(prompt, {"kv_prefill": "dense"}), (prompt, {"kv_prefill_budget": 64})],
    ]
    allowed = {"allow_override": ["prefill", "prefill_budget"]}
    with start({**ALONE, **allowed, "check_integrity": True}, 200) as engine:
        expected, found = [], []
        for tokens, own in asked:
            engine.scheduler.reset_prefix_cache()
            expected += engine.generate([tokens], NUM_GENERATED, [own])
        engine.scheduler.reset_prefix_cache()
        hits = engine.record_hits()
        for tokens, own in asked:
            found += engine.generate([tokens], NUM_GENERATED, [own])
    # The tail of a prompt is found by itself alone; a segment as a whole or not at all; what comes
    # before the first sparse segment by everybody.
    assert hits == [0, 576, 512, 256, 128, 128]
    assert found == expected


@pytest.mark.parametrize("method", ["adakv-perturb", "layer-keydiff", "knorm", "layer-probe"])
def test_entries_are_dropped_as_from_any_prompt(start: EngineFactory, method: str) -> None:
    settings = {**SPARSE, "method": method, "budget": 128, "check_integrity": True}
    with (
        start(settings, 90, max_num_batched_tokens=256, max_num_seqs=8) as engine,
        recording_blocks() as blocks,
    ):
        alone = answers_of(engine)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 5 - (len(PROMPTS[0]) < 160)
        engine.scheduler.reset_prefix_cache()
        with preempting_all(3) as preempted:
            assert engine.generate(PROMPTS, NUM_GENERATED) == alone
        assert preempted
        assert engine.blocks_in_use() == 0
    assert len(blocks) == 4


def test_a_compressed_context_is_prefilled_sparsely_once(start: EngineFactory) -> None:
    context = PROMPTS[-1]
    prompts = [[*context, *PROMPTS[0][skip : skip + 25]] for skip in (0, 30, 60)]
    settings = {**SPARSE, "method": "keydiff", "budget": 0.25, "check_integrity": True}
    with start({**settings, "context": len(context)}, 90) as engine:
        alone = []
        for prompt in prompts:
            engine.scheduler.reset_prefix_cache()
            alone += engine.generate([prompt], NUM_GENERATED)
        engine.scheduler.reset_prefix_cache()
        with recording_blocks() as blocks:
            assert engine.generate(prompts, NUM_GENERATED) == alone
        assert [*blocks] == [end_of(context[: 600 // 32 * 32])]


def test_what_is_kept_for_segments_is_given_back_with_the_last_one(
    start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    with start({**SPARSE, "method": "snapkv", "budget": 128}, 90) as engine:
        step = engine.worker.execute_model

        def record(scheduled: Any) -> Any:
            output = step(scheduled)
            kept.append(
                [request.progress.sparse is not None for request in engine.worker._requests]
            )
            return output

        monkeypatch.setattr(engine.worker, "execute_model", record)
        engine.scheduler.max_num_scheduled_tokens = 200
        engine.generate(PROMPTS[-1:], 3)
    # Chunks end at 192, 384 and 576, the sparse segments at 512; the next step gives back.
    assert kept[:4] == [[True], [True], [True], [False]]


def test_two_ranks_read_what_one_reads(
    start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    answers = []
    for ranks in (1, 2):
        with start(ALONE, 90, tensor_parallel_size=ranks) as engine:
            answers.append(engine.generate(PROMPTS, NUM_GENERATED))
    assert answers[0] == answers[1]
