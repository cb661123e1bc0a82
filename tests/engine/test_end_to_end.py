"""What the product promises, on a real engine: blocks freed, nothing corrupted, stock kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.conftest import EngineFactory, preempting_all
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cpu import worker as cpu_worker
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager
from vllm_kvselect.engine.scheduler.cut_scheduler import CutScheduler
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.kernels.build import KernelError
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.planning.cuts import Cut, Cuts, cuts
from vllm_kvselect.registry import METHODS

EVICTION = {"method": "adakv-perturb", "budget": 128}
ANY_METHOD = EVICTION | {"allow_override": ["method"]}
POOLED, BY_KEYS = {"kv_eviction": "layer-keydiff"}, {"kv_eviction": "knorm"}


def test_decoding_requests_hold_the_blocks_of_their_plan(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    (prompt,) = make_prompts([1500])
    with start_engine({"method": "adakv-perturb", "budget": 256}, 100) as engine:
        held = engine.record_blocks()
        engine.generate([prompt], max_tokens=200)
        assert engine.blocks_in_use() == 0
    (cut,) = cuts(1500, 32, EvictionConfig(method="adakv-perturb", budget=256))
    decode_blocks = [-(-(1500 + i) // 32) - cut.first_packed for i in range(1, 200)]
    # One step prefills with every block held, from the next one on the plan's blocks remain.
    assert held[0] == 47
    assert held[1:200] == decode_blocks
    assert decode_blocks[0] == 9


def test_the_first_token_waits_for_nothing(start_engine: EngineFactory, make_prompts: Any) -> None:
    prompts = make_prompts([1000, 700])
    with start_engine(ANY_METHOD, 100) as engine:
        firsts = engine.generate_alone(prompts, 1)
        assert engine.worker.kv_eviction_stats()["selection_seconds"] == 0  # nothing to drop for
        assert engine.blocks_in_use() == 0
        for prompt, first in zip(prompts, firsts, strict=True):
            (ended,) = engine.outputs([prompt], 9, stop_token_ids=first.token_ids)
            assert list(ended.token_ids) == first.token_ids
        stats = engine.worker.kv_eviction_stats()
        assert stats["selection_seconds"] == stats["num_evicted"] == 0
        assert not engine.worker._states[0].offsets.any()
        answers = engine.generate_alone(prompts, 2)
        stats = engine.worker.kv_eviction_stats()
        assert stats["num_evicted"] == 2
        assert stats["selection_seconds"] > 0
    assert [a.token_ids[:1] for a in answers] == [first.token_ids for first in firsts]


def test_blocks_of_a_request_that_ends_unpacked_are_the_next_ones(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    """The pool holds one prompt at a time, so each is prefilled where the last one was to pack."""
    prompts = make_prompts([1000, 1010, 990, 1020])
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in (1, 12, 1, 12)
    ]
    with start_engine({"method": "adakv-perturb", "budget": 128}, 36, max_model_len=1100) as engine:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = engine.llm.generate(inputs, params, use_tqdm=False)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 2
        engine.scheduler.reset_prefix_cache()
        alone = engine.generate_alone(prompts, 12)
    for result, param, answer in zip(results, params, alone, strict=True):
        assert list(result.outputs[0].token_ids) == answer.token_ids[: param.max_tokens]


def test_every_method_answers_beside_all_others_and_resumed_as_alone(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    prompts = make_prompts([40, *(240 + 6 * i for i in range(len(METHODS)))])
    settings: Any = [None, *({"kv_eviction": method} for method in METHODS)]
    # One step takes all prompts: none is packed when all are preempted after their first token.
    step = {"max_num_batched_tokens": sum(map(len, prompts)), "max_num_seqs": len(prompts)}
    with start_engine(ANY_METHOD, 500, enable_prefix_caching=False, **step) as engine:
        alone = engine.generate_alone(prompts, 20, settings)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == len(METHODS)
        together = engine.generate(prompts, 20, settings)
        engine.worker.reset_kv_eviction_stats()
        with preempting_all(len(prompts), num_tokens=1) as preempted:
            resumed = engine.generate(prompts, 20, settings)
        assert preempted == [1] * len(prompts)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == len(METHODS)
    for method, *answers in zip(["none", *METHODS], alone, together, resumed, strict=True):
        assert answers[0] == answers[1] == answers[2], method


def test_a_server_of_a_pooled_method(start_engine: EngineFactory, make_prompts: Any) -> None:
    """Without overrides, the scheduler is chosen for the server's own method."""
    prompts = make_prompts([900, 40, 1100])
    with start_engine({"method": "pyramidkv", "budget": 128}, 200) as engine:
        assert isinstance(engine.scheduler, CutScheduler)
        together = engine.generate(prompts, 40)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 2
        assert engine.generate_alone(prompts, 40) == together


def test_a_pool_holds_the_blocks_of_a_uniform_method(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    """In every step, whether layers share pages or not."""
    (prompt,), held = make_prompts([1000]), {}
    with start_engine(ANY_METHOD | {"budget": 256}, 100, enable_prefix_caching=False) as engine:
        blocks = engine.record_blocks()
        for method in ("snapkv", "pyramidkv", "layer-defensivekv"):
            engine.generate([prompt], 100, [{"kv_eviction": method}])
            held[method], blocks[:] = [*blocks], []
            (state,) = engine.worker._states
    assert held["snapkv"][0] == 32
    assert held["snapkv"][1:100] == [-(-(1000 + i) // 32) - 23 for i in range(1, 100)]
    assert held["pyramidkv"] == held["layer-defensivekv"] == held["snapkv"]
    # Where the layers' runs end: all pages are handed out, and to some layers more than to others.
    ends = state.offsets[state.offsets[:, -1, -1] > 0, :, -1]
    (cut,) = cuts(1000, 32, EvictionConfig(method="adakv-perturb", budget=256))
    assert (ends[:, -1] == 4 * 3 * cut.num_packed).all()
    assert ends.diff(dim=1).unique().numel() > 1


def test_a_machine_without_kernels_serves_the_same_tokens(
    start_engine: EngineFactory, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts([900, 1100])
    tokens = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(cpu_worker.cpu, "load", no_kernels)
        with start_engine(EVICTION, 200, max_num_batched_tokens=512) as engine:
            assert (engine.worker._kernels is not REFERENCES) is kernels
            tokens.append(engine.generate(prompts, 40))
    assert tokens[0] == tokens[1]


def no_kernels() -> None:
    raise KernelError("there is no C++ compiler here", "install g++")


def test_nothing_dropped_is_stock_token_for_token(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    lengths = [1 + 31 * i % 350 for i in range(24)]
    results = []
    for eviction in (None, {"method": "none"}, {"method": "adakv-perturb", "budget": 1024}):
        dtype = dtype_name(fast_dtype())
        with start_engine(eviction, 400, dtype=dtype, block_size=32) as engine:
            outputs = engine.outputs(make_prompts(lengths), 16, logprobs=3)
            results.append(
                [
                    [
                        {token: entry.logprob for token, entry in position.items()}
                        for position in output.logprobs
                    ]
                    for output in outputs
                ]
            )
    assert results[0] == results[1] == results[2]


def retain_everything(
    num_prompt_tokens: int,
    block_size: int,
    config: EvictionConfig,
    max_tokens: int = 0,
    page_size: int | None = None,
) -> Cuts:
    """A cut that packs every block before the tail and frees none."""
    assert page_size in (None, block_size)
    tail_start = (num_prompt_tokens - config.window) // block_size
    return Cuts([Cut(num_prompt_tokens, 0, tail_start, tail_start)] if tail_start > 0 else [])


@pytest.fixture
def everything_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Null blocks, by which a cut that is made is known, there are none then."""
    made: set[str] = set()
    allocate, due_cut = HeadwiseManager.allocate_new_blocks, HeadwiseManager._due_cut

    def allocate_and_note(manager: HeadwiseManager, request_id: str, *sizes: int) -> Any:
        blocks = allocate(manager, request_id, *sizes)
        made.update(manager._swaps)
        return blocks

    def due_once(manager: HeadwiseManager, request_id: str, num_tokens: int) -> Cut | None:
        return None if request_id in made else due_cut(manager, request_id, num_tokens)

    monkeypatch.setattr("vllm_kvselect.planning.plan.cuts", retain_everything)
    monkeypatch.setattr(HeadwiseManager, "allocate_new_blocks", allocate_and_note)
    monkeypatch.setattr(HeadwiseManager, "_due_cut", due_once)


@pytest.mark.usefixtures("everything_retained")
def test_packing_everything_changes_nothing(start_engine: EngineFactory, make_prompts: Any) -> None:
    prompts = make_prompts([70 + 29 * i for i in range(12)])
    with start_engine(None, 400) as engine:
        expected = engine.generate(prompts, 16)
    with start_engine(EVICTION, 400) as engine:
        assert engine.generate(prompts, 16) == expected
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 12


@pytest.mark.usefixtures("everything_retained")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packing_everything_in_half_precision(
    dtype: str, start_engine: EngineFactory, make_prompts: Any
) -> None:
    # Few tokens: some processors take 40 times longer for them than in float32.
    prompts, answers = make_prompts([70, 133]), []
    for eviction in (None, EVICTION):
        with start_engine(eviction, 100, dtype=dtype) as engine:
            answers.append(engine.generate(prompts, 2))
    for stock, ours in zip(*answers, strict=True):
        # The first token comes from the prefill. Packed entries are summed in another order, so the
        # second is off by roundings of half precision, some 2**-8 a layer of a logit of about 10.
        assert ours.token_ids == stock.token_ids
        assert ours.logprobs[0] == stock.logprobs[0]
        assert ours.logprobs[1] == pytest.approx(stock.logprobs[1], abs=4 * 10 * 2**-8)


@pytest.mark.usefixtures("everything_retained")
def test_packing_everything_with_heads_of_80_channels(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 320,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 80,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"model": tmp_path, "load_format": "dummy", "skip_tokenizer_init": True}
    prompts, answers = [[i * 7 % 500 for i in range(n)] for n in (100, 333, 450)], []
    for eviction in (None, EVICTION):
        with start_engine(eviction, 100, **settings) as engine:
            answers.append(engine.generate(prompts, 24))
            if eviction is not None:
                assert engine.worker._started[0].isa == "vec16"
    assert answers[0] == answers[1]


def test_chunks_of_any_size_retain_the_same(start_engine: EngineFactory, make_prompts: Any) -> None:
    # 500 leaves a last chunk of 17 tokens, shorter than the window; 16 cuts the window in three.
    lengths, settings = (517, 1017, 517, 517), (None, None, POOLED, BY_KEYS)
    prompts = make_prompts(lengths)
    with start_engine(ANY_METHOD, 200) as engine:
        expected = engine.generate(prompts, 32, settings)
    for chunk in (16, 48, 500):
        with start_engine(ANY_METHOD, 200, max_num_batched_tokens=chunk, max_num_seqs=4) as engine:
            assert engine.generate_alone(prompts, 32, settings) == expected, chunk
            engine.scheduler.reset_prefix_cache()
            assert engine.generate(prompts, 32, settings) == expected, chunk


def test_preempted_requests_resume_as_if_never_interrupted(
    start_engine: EngineFactory, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts([300 + 13 * i for i in range(6)])
    # The latest are preempted first.
    methods = (None, "pyramidkv", None, "layer-defensivekv", "knorm", "layer-keydiff")
    extra_args = [method and {"kv_eviction": method} for method in methods]
    with start_engine(ANY_METHOD, 200) as engine:
        expected = engine.generate_alone(prompts, 110, extra_args)

    preempted, reached = [], set()
    preempt = Scheduler._preempt_request

    def record(scheduler: Scheduler, request: Any, *args: Any, **kwargs: Any) -> None:
        generated = request.num_tokens - request.num_prompt_tokens
        preempted.append((methods[(request.num_prompt_tokens - 300) // 13], generated))
        preempt(scheduler, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", record)
    for settings in (
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 100, "max_num_seqs": 8},
    ):
        preempted.clear()
        with start_engine(ANY_METHOD, 39, max_model_len=1024, **settings) as engine:
            assert engine.generate(prompts, 110, extra_args) == expected
            assert engine.blocks_in_use() == 0
        in_mid_answer = {method for method, num_generated in preempted if num_generated > 1}
        assert in_mid_answer
        reached |= in_mid_answer
    assert {"knorm", "layer-keydiff"} <= reached


def test_prefix_hits_stay_before_the_cut(start_engine: EngineFactory, make_prompts: Any) -> None:
    (prompt,) = make_prompts([1000])
    longer = prompt + make_prompts([300], skip=5000)[0]
    methods = (POOLED, BY_KEYS)
    with start_engine(ANY_METHOD, 300, enable_prefix_caching=False) as engine:
        expected, expected_longer = engine.generate_alone([prompt, longer], 48)
        expected_of = engine.generate_alone([prompt] * 2, 48, methods)
    settings = EvictionConfig(**EVICTION)
    most = cuts(1000, 32, settings).most_found(32, settings.window)
    with start_engine(ANY_METHOD, 300) as engine:
        assert engine.generate([prompt, prompt], 48) == [expected, expected]
        hits = engine.record_hits()
        assert engine.generate([prompt], 48) == [expected]
        assert hits == [most]
        # A longer prompt finds all that was computed before the cut.
        assert engine.generate([longer, prompt], 48) == [expected_longer, expected]
        assert hits[1:] == [1000 // 32 * 32, most]
        # So do a pool, and a method that looks through no query.
        hits.clear()
        assert engine.generate([prompt] * 4, 48, methods * 2) == expected_of * 2
        assert hits == [most] * 4


def test_a_second_request_in_shared_blocks_does_not_disturb_the_first(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    prompts = make_prompts([1000, 900])
    shared = [prompts[0], prompts[0][:700] + prompts[1][:300], prompts[0][:500]]
    with start_engine(EVICTION, 300, enable_prefix_caching=False) as engine:
        expected = engine.generate_alone(shared, 64)
    with start_engine(EVICTION, 300, max_num_batched_tokens=256, max_num_seqs=8) as engine:
        for _ in range(2):
            assert engine.generate(shared, 64) == expected
        # Freed blocks are handed out again at once: other requests run in them meanwhile.
        assert engine.generate([*make_prompts([800, 700], skip=9000), *shared], 64)[2:] == expected


def test_offsets_of_every_layer_hand_out_every_page(
    start_full_engine: EngineFactory, make_prompts: Any
) -> None:
    (prompt,) = make_prompts([1000])
    with start_full_engine(EVICTION, 100) as engine:
        engine.generate([prompt], 8)
        (state,) = engine.worker._states
    (used,) = state.offsets[:, 0, -1].nonzero()
    (cut,) = cuts(1000, 32, EvictionConfig(**EVICTION))
    assert torch.equal(state.offsets[used[0], :, -1], 3 * cut.num_packed * torch.arange(1, 31))
    assert torch.equal(state.offsets[used[0], 1:, 0], state.offsets[used[0], :-1, -1])
    assert (state.offsets[used[0]].diff(dim=-1) >= 0).all()
    assert state.offsets[used[0]].diff(dim=-1).unique().numel() > 1


def test_integrity_check_stops_the_request_and_not_the_engine(
    start_engine: EngineFactory, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts([600, 900, 100])
    with start_engine(EVICTION | {"check_integrity": True}, 200) as engine:
        expected = [output.token_ids for output in engine.outputs(prompts, 40)]
        schedule, num_steps = Scheduler.schedule, 0

        def hash_a_packed_block(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 20:
                (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
                request = next(r for r in scheduler.running if r.num_prompt_tokens == 900)
                blocks = manager.req_to_blocks[request.request_id]
                first = manager.plan_of(request).cuts[0].num_freed
                manager.block_pool.cache_full_blocks(request, blocks, first, first + 1, 32, 0)
            return schedule(scheduler, *args, **kwargs)

        monkeypatch.setattr(Scheduler, "schedule", hash_a_packed_block)
        outputs = engine.outputs(prompts, 40)
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
        assert list(outputs[1].token_ids) == list(expected[1])[: len(outputs[1].token_ids)]
        assert len(outputs[1].token_ids) < 40
        assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]
        # The planted block is not found in the prefix cache, and nothing is lost.
        assert [output.token_ids for output in engine.outputs(prompts, 40)] == expected
        assert engine.blocks_in_use() == 0
