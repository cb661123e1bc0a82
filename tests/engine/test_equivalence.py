"""Each request gives, token for token, what it gives alone, whatever runs beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import random_adapter
from tests.engine.conftest import SHALLOW_LAYERS, Engine, EngineFactory
from tests.load.mixture import (
    BLOCK_SIZE,
    GREEDY,
    KINDS,
    LORA_ADAPTER,
    MAX_MODEL_LEN,
    SERVER,
    Answer,
    Request,
    assert_as_alone,
    draw,
    serve,
    serve_alone,
)

LIMITS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "disable_log_stats": False,
    "skip_tokenizer_init": False,  # some requests ask for structured outputs
}
# Chunks that cut observation windows, and a pool with little room beside the longest request.
CROWDED: dict[str, Any] = {**LIMITS, "max_num_batched_tokens": 150, "max_num_seqs": 8}
NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 8
# Even a single token that was seen before is a reason to draft: most drafts are rejected.
NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def metric(engine: Engine, name: str) -> float:
    return sum(found.value for found in engine.llm.get_metrics() if found.name == name)


def alone(start_engine: EngineFactory, requests: list[Request]) -> dict[str, Answer]:
    """Answers of an engine with room, without prefix cache, chunks or speculation."""
    with start_engine(SERVER, 100, enable_prefix_caching=False, **LIMITS) as engine:
        return serve_alone(engine.llm, requests)


def test_every_kind_of_request(start_engine: EngineFactory, text_tokens: list[int]) -> None:
    requests = draw(text_tokens, num_requests=54, num_distinct=30, seed=8)
    expected = alone(start_engine, requests)
    with start_engine(SERVER, NUM_BLOCKS, **CROWDED) as engine:
        service = serve(engine.llm, requests, 16, seed=8, preempt=0.02, stream=True)
        assert_as_alone(requests, expected, service.answers)
        assert {request.kind for request in requests} == set(KINDS)
        for event in ("preemptions", "resets", "left", "cached tokens"):
            assert service.seen[event] > 0, service.seen
        assert engine.worker.kv_eviction_stats()["num_evicted"] > 25
        assert metric(engine, "vllm:kv_eviction_state_hits") > 0
        assert engine.blocks_in_use() == 0
    for request, answer in zip(requests, service.answers, strict=True):
        # vLLM computes the whole prompt for its log-probabilities.
        assert "prompt_logprobs" not in request.sampling or answer.num_cached_tokens == 0


def test_clients_that_leave_in_mid_prefill_and_right_after_eviction(
    start_engine: EngineFactory, text_tokens: list[int]
) -> None:
    prompts = [tuple(text_tokens[start : start + 300]) for start in (0, 3000)]
    with start_engine(SERVER, 40, **CROWDED) as engine:
        for method in ("adakv-perturb", "knorm", "layer-keydiff"):
            greedy = {"temperature": 0.0, "max_tokens": 6, "extra_args": {"kv_eviction": method}}
            staying = [Request("greedy", prompt, greedy) for prompt in prompts]
            expected = serve_alone(engine.llm, staying)
            # Two chunks of the prompt, the first token with the second, then blocks are freed.
            for num_steps in (1, 2, 3):
                assert engine.llm.reset_prefix_cache()
                requests = [replace(staying[0], leaves_after=num_steps), *staying]
                service = serve(engine.llm, requests, 3, seed=num_steps, stream=True)
                left, *answers = service.answers
                assert len(left.token_ids.get(0, [])) == num_steps - 1
                assert_as_alone(staying, expected, answers)
                assert engine.blocks_in_use() == 0
        engine.llm.llm_engine.step()  # tells the worker who has left
        assert engine.worker.kv_eviction_stats()["num_requests"] == 0


# A drafter that is right drafts less often.
@pytest.mark.parametrize(("drafter", "least"), [("ngram", 200), ("the model itself", 100)])
def test_speculation_changes_nothing(
    drafter: str,
    least: int,
    start_engine: EngineFactory,
    shallow_model: Path,
    text_tokens: list[int],
) -> None:
    # Tokens alone hardly show a wrong draft: the model repeats itself.
    names = ("greedy", "JSON", "stop string", "until the context is full")
    kinds = {name: GREEDY[name] | {"logprobs": 1} for name in names}
    requests = draw(text_tokens, num_requests=20, num_distinct=14, seed=2, kinds=kinds)
    expected = alone(start_engine, requests)
    speculation, num_blocks = NGRAM, NUM_BLOCKS
    if drafter != "ngram":
        itself = {"method": "draft_model", "model": str(shallow_model)}
        # Its layers are in every block, which so takes twice the memory.
        speculation, num_blocks = {**itself, "num_speculative_tokens": 4}, 2 * NUM_BLOCKS
    with start_engine(SERVER, num_blocks, speculative_config=speculation, **CROWDED) as engine:
        service = serve(engine.llm, requests, 16, seed=2, preempt=0.1)
        assert_as_alone(requests, expected, service.answers)
        assert service.seen["preemptions"] > 0
        assert metric(engine, "vllm:spec_decode_num_accepted_tokens") > 10
        assert metric(engine, "vllm:spec_decode_num_draft_tokens") > least
        assert engine.llm.reset_prefix_cache()  # fails while blocks are held


def adapter(folder: Path, seed: int) -> str:
    """An adapter for the attention's projections."""
    sizes = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
    layers = [f"model.layers.{layer}.self_attn" for layer in range(SHALLOW_LAYERS)]
    named = {f"{layer}.{name}": size for layer in layers for name, size in sizes.items()}
    random_adapter(folder, named, seed)
    return str(folder)


def test_lora_adapters(start_engine: EngineFactory, text_tokens: list[int], tmp_path: Path) -> None:
    adapters = [adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    kinds = {kind: GREEDY[kind] for kind in ("greedy", "log-probabilities", "one token")}
    requests = draw(text_tokens, 18, 12, seed=3, kinds=kinds, num_adapters=2)
    # One slot more than adapters: with all of them taken, vLLM 0.32 on CPU applies the last one to
    # requests for the base model that run beside others.
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    with start_engine(SERVER, NUM_BLOCKS, **CROWDED, **lora) as engine:
        expected = serve_alone(engine.llm, requests, adapters)
        assert engine.llm.reset_prefix_cache()
        service = serve(engine.llm, requests, 12, seed=3, preempt=0.02, adapters=adapters)
        assert_as_alone(requests, expected, service.answers)
        # The adapters do something: with another one, the same prompt goes on otherwise.
        request = next(request for request in requests if request.kind == "greedy")
        variants = [
            replace(request, sampling=request.sampling | {LORA_ADAPTER: number}, leaves_after=None)
            for number in range(3)
        ]
        answers = serve(engine.llm, variants, 3, adapters=adapters).answers
        assert len({tuple(answer.token_ids[0]) for answer in answers}) == 3
