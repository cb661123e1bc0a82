"""OpenVINO GenAI at work, in its environment: see `openvino.py`."""

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai as genai
from peers.lines import serve

Job = dict[str, Any]

WARM_UP_TOKENS = 8
FIRST_TOKENS = 3
"""How often the first token of a prompt alone is waited for."""
FEW_BLOCKS = 4
"""Of a pipeline that is made to see how large a block is."""


class Run(NamedTuple):
    """What a pipeline made of prompts that came all at once.

    Attributes:
        seconds: Until the last one was answered.
        first_token_seconds: Until the first token of any.
        steps: Of the pipeline.
        usage: Largest share of the KV cache in use.
        answers: Token ids.
    """

    seconds: float
    first_token_seconds: float
    steps: int
    usage: float
    answers: list[list[int]]


def answers(job: Job) -> Iterator[dict[str, Any]]:
    """Does what a job asks for: measures its prompts, or answers its examples."""
    return iter([_speed(job)]) if "prompts" in job else _examples(job)


def _speed(job: Job) -> dict[str, Any]:
    """The twin of vLLM's measurement in `benchmarks/_throughput.py`."""
    block_bytes = _block_bytes(job)
    num_blocks = job["kv_bytes"] // block_bytes
    pipeline = _pipeline(job, num_blocks)
    _run(pipeline, [job["warm_up"]], _exactly(pipeline, WARM_UP_TOKENS))
    run = _run(pipeline, job["prompts"], _exactly(pipeline, job["output_len"]))
    prefill = _run(pipeline, job["prompts"], _exactly(pipeline, 1))
    two = _exactly(pipeline, 2)
    alone = [_run(pipeline, job["prompts"][:1], two) for _ in range(FIRST_TOKENS)]
    return {
        "seconds": run.seconds,
        "prefill_seconds": prefill.seconds,
        "first_token_seconds": statistics.median(each.first_token_seconds for each in alone),
        "steps": run.steps,
        "output_tokens": sum(map(len, run.answers)),
        "usage": run.usage,
        "num_blocks": num_blocks,
        "block_bytes": block_bytes,
        "openvino": ov.__version__,
        "openvino_genai": genai.__version__,
    }


def _examples(job: Job) -> Iterator[dict[str, Any]]:
    """Answers one example after the other."""
    longest = max(len(each["prompt"]) + each["max_tokens"] for each in job["examples"])
    pipeline = _pipeline(job, longest // job["block_size"] + 2)
    for example in job["examples"]:
        config = _greedy(pipeline, example["max_tokens"])
        config.stop_token_ids = set(job["end_tokens"])
        config.stop_strings = set(example["stop"])
        run = _run(pipeline, [example["prompt"]], config)
        yield {"example": example["example"], "tokens": run.answers[0]}


def _pipeline(job: Job, num_blocks: int) -> genai.ContinuousBatchingPipeline:
    """Loads the model with a KV cache of so many blocks."""
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = num_blocks
    scheduler.enable_prefix_caching = False
    if job["batched_tokens"]:
        scheduler.max_num_batched_tokens = job["batched_tokens"]
    if job["eviction"]:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = _eviction(**job["eviction"])
    if job["sparse"]:
        scheduler.use_sparse_attention = True
        scheduler.sparse_attention_config = genai.SparseAttentionConfig(
            mode=genai.SparseAttentionMode.XATTENTION
        )
    properties = {
        "INFERENCE_PRECISION_HINT": job["precision"],
        "KV_CACHE_PRECISION": job["kv_precision"],
    }
    if job["threads"]:
        properties["INFERENCE_NUM_THREADS"] = job["threads"]
    return genai.ContinuousBatchingPipeline(job["folder"], scheduler, "CPU", properties)


def _eviction(aggregation: str, kvcrush_blocks: int, **sizes: int) -> genai.CacheEvictionConfig:
    return genai.CacheEvictionConfig(
        **sizes,
        aggregation_mode=getattr(genai.AggregationMode, aggregation),
        kvcrush_config=genai.KVCrushConfig(budget=kvcrush_blocks),
    )


def _block_bytes(job: Job) -> int:
    """Bytes of a block; they depend on precision and processor, and are known after a token."""
    pipeline = _pipeline(job, FEW_BLOCKS)
    _run(pipeline, [job["warm_up"][:1]], _exactly(pipeline, 1))
    return int(pipeline.get_metrics().cache_size_in_bytes // FEW_BLOCKS)


def _greedy(pipeline: genai.ContinuousBatchingPipeline, max_tokens: int) -> genai.GenerationConfig:
    config = pipeline.get_config()
    config.max_new_tokens = max_tokens
    config.do_sample = False
    return config


def _exactly(pipeline: genai.ContinuousBatchingPipeline, num_tokens: int) -> genai.GenerationConfig:
    config = _greedy(pipeline, num_tokens)
    config.ignore_eos = True
    return config


def _run(
    pipeline: genai.ContinuousBatchingPipeline,
    prompts: list[list[int]],
    config: genai.GenerationConfig,
) -> Run:
    """Answers prompts that come all at once.

    Raises:
        RuntimeError: If one was not answered, as one that does not fit into the KV cache.
    """
    start = time.perf_counter()
    handles = [
        pipeline.add_request(index, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
        for index, prompt in enumerate(prompts)
    ]
    first, steps, usage = 0.0, 0, 0.0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        steps += 1
        usage = max(usage, pipeline.get_metrics().cache_usage / 100)
        if not first and any(handle.can_read() for handle in handles):
            first = time.perf_counter() - start
    seconds = time.perf_counter() - start
    for handle in handles:
        if handle.get_status() != genai.GenerationStatus.FINISHED:
            raise RuntimeError(f"a prompt was left unanswered: {handle.get_status()}")
    found = [handle.read_all()[0].generated_ids for handle in handles]
    return Run(seconds, first, steps, usage, found)


if __name__ == "__main__":
    serve(answers)
