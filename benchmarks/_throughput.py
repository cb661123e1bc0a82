"""What a vLLM engine takes for prompts that all come at once, in the engine's own process."""

import statistics
import time
from typing import TYPE_CHECKING, Any

from _engine import (
    Job,
    ask,
    describe,
    empty_prefix_cache,
    engine_arguments,
    eviction_stats,
    reset_eviction_stats,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

Result = dict[str, Any]

WARM_UP_TOKENS = 8
FIRST_TOKENS = 3
"""How often the first token of a prompt alone is waited for."""


def measure(job: Job) -> Result:
    """The child's part: times all prompts at once, their prefill alone, and one prompt alone."""
    from vllm import LLM

    llm = LLM(**engine_arguments(job))
    found = all_at_once(llm, job)
    prefill_seconds = _timed(llm, job, 1)  # one token drops nothing: without selection
    alone = _first_token_seconds(llm, job)
    return found | {"prefill_seconds": prefill_seconds, "first_token_seconds": alone}


def all_at_once(llm: "LLM", job: Job) -> Result:
    """Times all prompts at once, and counts what happens meanwhile."""
    # One prompt of full length, and none of those measured: everything that happens only once,
    # such as compiling or binding weights, happens here.
    generate(llm, [job["warm_up"]], WARM_UP_TOKENS)

    held = watched(llm)
    before = _counts(llm)
    seconds = _timed(llm, job, job["output_len"])
    stats = eviction_stats(llm, job)
    counts = {name: count - before[name] for name, count in _counts(llm).items()}
    # Preempted prompts are selected from again: this is the time of each prompt's first selection.
    first = len(job["prompts"]) / stats["num_evicted"] if stats["num_evicted"] else 0.0
    engine = describe(llm)
    return {
        "seconds": seconds,
        "selection_seconds": stats["selection_seconds"],
        "selection_seconds_once": stats["selection_seconds"] * first,
        "num_evicted": stats["num_evicted"],
        **counts,
        # Of all blocks but the one that vLLM keeps for itself.
        "most_blocks_per_request": max(held) * (engine["num_blocks"] - 1),
        "output_tokens": len(job["prompts"]) * job["output_len"],
        **engine,
    }


def watched(llm: "LLM") -> list[float]:
    """The share of the KV cache that a running request holds in the mean, from now on step by step.

    vLLM gives its own loggers both numbers at once; its metrics are read one after the other.
    """
    manager = llm.llm_engine.logger_manager
    record, held = manager.record, []

    def watched(scheduler_stats: Any, **others: Any) -> None:
        record(scheduler_stats=scheduler_stats, **others)
        if scheduler_stats is not None and scheduler_stats.num_running_reqs:
            held.append(scheduler_stats.kv_cache_usage / scheduler_stats.num_running_reqs)

    manager.record = watched
    return held


def _timed(llm: "LLM", job: Job, output_len: int) -> float:
    """Seconds for all prompts at once from an empty prefix cache."""
    empty_prefix_cache(llm)
    reset_eviction_stats(llm, job)
    start = time.perf_counter()
    generate(llm, job["prompts"], output_len)
    return time.perf_counter() - start


def _first_token_seconds(llm: "LLM", job: Job) -> float:
    """Median seconds to the first token of one prompt alone."""
    seconds = []
    for _ in range(FIRST_TOKENS):
        empty_prefix_cache(llm)
        seconds += first_token_seconds(llm, job["prompts"][:1])
    return statistics.median(seconds)


def first_token_seconds(llm: "LLM", prompts: list[list[int]]) -> list[float]:
    """Seconds to the first token of each prompt, one after the other.

    Each asks for a second one, too: of a prompt that only one token follows nothing is dropped.
    """
    outputs = [generate(llm, [prompt], 2)[0] for prompt in prompts]
    return [output.metrics.first_token_latency for output in outputs]


def generate(llm: "LLM", prompts: list[list[int]], output_len: int) -> list["RequestOutput"]:
    """Generates exactly `output_len` tokens per prompt, or fails."""
    outputs = ask(llm, {"output_len": output_len}, prompts)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if counts != [output_len] * len(prompts):
        raise RuntimeError(f"asked {len(prompts)} times for {output_len} tokens, got {counts}")
    return outputs


def _counts(llm: "LLM") -> dict[str, int]:
    """Steps of the engine, preemptions, and tokens drafted and accepted, so far."""
    metrics = {each.name: each for each in llm.get_metrics()}
    counts = {
        "steps": metrics["vllm:iteration_tokens_total"].count,
        "preemptions": metrics["vllm:num_preemptions"].value,
    }
    for name, drafts in (("drafted", "draft"), ("accepted", "accepted")):
        metric = metrics.get(f"vllm:spec_decode_num_{drafts}_tokens")  # missing: nobody drafts
        counts[name] = metric.value if metric else 0
    return counts
