"""Runs each vLLM engine in a fresh process: a JSON job goes in, one JSON line comes back.

A script calls itself again as a child, so no engine inherits anything from the one before it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from peers.worker import stop
from rich.console import Console

from vllm_kvselect.config import CONFIG_KEY, ConfigError, EvictionConfig
from vllm_kvselect.evaluation.server import first_error, plugin_environment, tail
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.tiny_model import TinyModelError

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput

CHILD_ARGUMENT = "child"
MIB = 1 << 20

Job = dict[str, Any]
"""What a child is told. `eviction` decides who answers: None is stock, a mapping is the plugin."""


class BenchmarkError(RuntimeError):
    """A benchmark that cannot go on: says why and what to do."""


def run_script(
    main: Callable[..., None] | typer.Typer,
    measure: Callable[[Job], Any] | None = None,
    answer: Callable[[Callable[[Job], Any]], None] | None = None,
) -> None:
    """Runs a benchmark, as the script that was started or as one of its own children.

    Args:
        main: The script's command, whose parameters are the options, or its commands.
        measure: What a child does with its job, where the script has children.
        answer: How a child gives its answers; by default a single one.
    """
    if measure and sys.argv[1:] == [CHILD_ARGUMENT]:
        (answer or _answer)(measure)
        return
    try:
        main() if isinstance(main, typer.Typer) else typer.run(main)
    except (BenchmarkError, ConfigError, EvaluationError, TinyModelError) as error:
        sys.exit(f"error: {error}")


def run_child(script: str, job: Job, timeout: float | None = None) -> dict[str, Any]:
    """Runs a job in a fresh process of the same script and waits for its answer.

    Args:
        script: File of the calling script, which has called `run_script`.
        job: The job; without an `eviction` mapping the plugin is not even loaded.
        timeout: Seconds after which the child is ended.

    Returns:
        What the child's function returned.

    Raises:
        BenchmarkError: If the child failed or took too long; the message holds the end of its log.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [sys.executable, script, CHILD_ARGUMENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=child_environment(job),
            text=True,
        )
        try:
            reply, _ = child.communicate(json.dumps(job), timeout)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"the engine's process took more than {timeout} s") from error
        finally:
            stop(child)
        if child.returncode == 0:
            answer: dict[str, Any] = json.loads(reply)
            return answer
        log.seek(0)
        raise failed(log.read())


def failed(log: str) -> BenchmarkError:
    """What to raise when an engine's process failed: its first error, and how its log ends."""
    reason = f"the engine's process failed: {first_error(log)}"
    return BenchmarkError(f"{reason}\nThe end of its log:\n{tail(log)}")


def run_in_turn(script: str, jobs: dict[str, Job], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Runs every job once a round, in alternating order so that a slow drift cancels out.

    Args:
        script: As of `run_child`.
        jobs: By engine.
        rounds: Number of rounds.

    Returns:
        What each engine's children returned, round by round.
    """
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    with Console(stderr=True).status("starting") as status:
        for index in range(rounds):
            for name in list(jobs) if index % 2 == 0 else list(reversed(jobs)):
                status.update(f"round {index + 1} of {rounds}: {name}")
                measured[name].append(run_child(script, jobs[name]))
    return measured


def bytes_of_tokens(model: str, dtype: str, num_tokens: int) -> int:
    """Bytes that so many tokens take in a KV cache, in all layers."""
    config = json.loads((Path(model) / "config.json").read_text())
    width = 2 * config["num_key_value_heads"] * config.get("head_dim", 64)
    per_token: int = width * config["num_hidden_layers"] * (4 if dtype == "float32" else 2)
    return num_tokens * per_token


def engine_arguments(job: Job) -> dict[str, Any]:
    """Translates a job into vLLM's engine arguments; what it does not name is vLLM's default."""
    arguments = {
        "model": job["model"],
        "dtype": job["dtype"],
        "enforce_eager": job["enforce_eager"],
        "kv_cache_memory_bytes": job["kv_bytes"],
        "max_model_len": job["max_model_len"],
        "disable_log_stats": False,  # the preemption counter is one of the log stats
    }
    for name in ("block_size", "kv_cache_dtype", "speculative_config"):
        if job.get(name):
            arguments[name] = job[name]
    if "prefix_caching" in job:
        arguments["enable_prefix_caching"] = job["prefix_caching"]
    if job["eviction"] is not None:
        arguments["additional_config"] = {CONFIG_KEY: job["eviction"]}
    return arguments


def sampling(job: Job) -> "SamplingParams":
    """As many tokens as a job says, the likeliest ones."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=job["output_len"], ignore_eos=True, detokenize=False
    )


def ask(llm: "LLM", job: Job, prompts: Sequence[list[int]]) -> list["RequestOutput"]:
    """Answers to some prompts at once."""
    given = [{"prompt_token_ids": [*ids]} for ids in prompts]
    answers: list[RequestOutput] = llm.generate(given, sampling(job), use_tqdm=False)
    return answers


def describe(llm: "LLM") -> dict[str, Any]:
    """Returns what the engine made of its arguments, and the versions it runs on."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    cache = llm.llm_engine.vllm_config.cache_config
    return {
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "device": current_platform.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }


def empty_prefix_cache(llm: "LLM") -> None:
    """Empties the prefix cache, so that the next prompts are computed and not looked up.

    Raises:
        RuntimeError: If blocks are still held, which would make the next measurement too fast.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache cannot be reset: blocks of a request are still held")


def reset_eviction_stats(llm: "LLM", job: Job) -> None:
    """Sets the plugin's counters to zero, where there are any."""
    if _evicts(job):
        llm.collective_rpc("reset_kv_eviction_stats")


def eviction_stats(llm: "LLM", job: Job) -> dict[str, float]:
    """Returns the plugin's counters, of the slowest worker where there are several.

    Raises:
        RuntimeError: If prompts were left whole that the retention plan shortens: what is measured
            then would be stock.
    """
    if not _evicts(job):
        return {"selection_seconds": 0.0, "num_evicted": 0}
    workers = llm.collective_rpc("kv_eviction_stats")
    stats = {key: max(worker[key] for worker in workers) for key in workers[0]}
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    shortened = [
        len(prompt)
        for prompt in job["prompts"]
        if blocks_retained(len(prompt), block_size, job["eviction"])
        < ceil(len(prompt) / block_size)
    ]
    if stats["num_evicted"] < len(shortened):
        raise RuntimeError(
            f"only {stats['num_evicted']} of {len(shortened)} prompts had entries dropped"
        )
    return stats


def blocks_retained(prompt_len: int, block_size: int, eviction: dict[str, Any] | None) -> int:
    """Returns the blocks that hold a prompt during decode, by the retention plan."""
    num_blocks = ceil(prompt_len / block_size)
    if not eviction:
        return num_blocks
    config = EvictionConfig.parse(eviction)
    return num_blocks - cuts(prompt_len, block_size, config).num_freed(prompt_len)


def default_model() -> str:
    """Returns the folder of the small model, made on first use."""
    from vllm_kvselect.tiny_model import tiny_model

    return str(tiny_model())


def stock_environment() -> dict[str, str]:
    """Returns this process's environment with vLLM's general plugins switched off."""
    return {**os.environ, "VLLM_PLUGINS": ""}


def child_environment(job: Job) -> dict[str, str]:
    """Returns a child's environment; without an `eviction` mapping, one without the plugin."""
    return stock_environment() if job["eviction"] is None else plugin_environment()


@contextmanager
def reply_alone() -> Iterator[TextIO]:
    """Gives the pipe to the parent for the answer alone, and sends everything else to the log.

    vLLM logs to stdout, also from processes of its own; a duplicate is not inherited.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as reply:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield reply


def _answer(measure: Callable[[Job], dict[str, Any]]) -> None:
    """The child's side of `run_child`: reads the job, measures, writes one JSON line."""
    job = json.load(sys.stdin)
    with reply_alone() as reply:
        print(json.dumps(measure(job)), file=reply)


def _evicts(job: Job) -> bool:
    """Whether the job's engine has our worker; else it is stock, if only in all but name."""
    return job["eviction"] is not None and EvictionConfig.parse(job["eviction"]).may_act
