"""An engine in a process of its own, which is asked for one workload after another.

Prompts are random tokens, never the same twice, answers are greedy, and both have their full
length. Without a card models are small ones of the same kind, and lengths and numbers small.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _children import Answers, Row, run_child
from _device import HAS_CARD
from _engine import CONFIG_KEY, BenchmarkError, Job, empty_prefix_cache
from _models import bytes_of_a_token, config_of

from vllm_kvselect.evaluation.endpoint import ANSWER_KEY

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

SHRINK, MOST = (1, 10**6) if HAS_CARD else (32, 3)
"""Without a card every length is a thirty-second, and of what is many there are three."""
SHORTEST = 1 if HAS_CARD else 160
"""Tokens of a prompt: half of fewer would be less than a window."""
SEGMENTS = {"prefill_segment": 64, "prefill_budget": 64, "prefill_dense_until": 64}
SMALL = {} if HAS_CARD else SEGMENTS
"""Settings of a sparse prefill of short prompts."""
TOKENS_OF_A_GIB = 2**13
"""Of an 8B in bfloat16; all pools are given so."""
GRAPHS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
"""Sizes of batches for which every engine captures graphs; vLLM's own list takes longer."""
NOT_LOADED = (
    "the plugin is not loaded: additional_config was ignored; install vllm-kvselect so that its "
    "entry point is visible (a dist-info on the path)"
)
READ = (4000, 3000, 1500, 2600, 6000)
"""Prompts of the proofs."""


def make_ready(job: Job) -> tuple[Row, Answers]:
    """Starts the engine of a job and warms it up."""
    times = [time.perf_counter()]
    from vllm import LLM

    times.append(time.perf_counter())
    asked = Asked(LLM(**arguments(job)), config_of(job["kind"])["vocab_size"])
    if asked.is_ours != (job["eviction"] is not None):
        raise BenchmarkError(NOT_LOADED)
    asked.generate(2, 2048, 8)
    times.append(time.perf_counter())
    cache = asked.llm.llm_engine.vllm_config.cache_config
    imported, started = (end - start for start, end in pairwise(times))
    numbers = {"blocks": cache.num_gpu_blocks, "block_size": cache.block_size}
    said = "imported in {:.0f} s, started in {:.0f} s, {} blocks of {} tokens"
    row = {"what": "ready", "result": said.format(imported, started, *numbers.values())}
    return row | numbers, lambda command: getattr(asked, command.pop("do"))(**command)


def arguments(job: Job) -> dict[str, Any]:
    """Of vLLM's engine."""
    num_tokens = job["gib"] * TOKENS_OF_A_GIB // SHRINK + 64  # and the null block
    given = {
        "model": job["model"],
        "load_format": "auto" if job["kind"] == "loud" else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if HAS_CARD else "float32",
        "max_model_len": max(job["longest"] // SHRINK, 2 * SHORTEST),
        "max_num_seqs": 64 if HAS_CARD else 16,
        "max_num_batched_tokens": 8192 // SHRINK,
        "kv_cache_memory_bytes": num_tokens * bytes_of_a_token(config_of(job["kind"])),
        "gpu_memory_utilization": 0.02,  # what has to be free at the start; others stand beside it
        "disable_log_stats": False,
        **job["arguments"],
    }
    if HAS_CARD:
        given.setdefault("compilation_config", {"cudagraph_capture_sizes": GRAPHS})
    else:
        given |= {"enforce_eager": True, "attention_backend": None, "block_size": 32}
    if job["eviction"] is not None:
        given["additional_config"] = {CONFIG_KEY: shrunk(job["eviction"]) | SMALL}
    return given


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with numbers of tokens as they are here, and no budget below a window."""
    if HAS_CARD:
        return settings
    counts = {key: it // SHRINK for key, it in settings.items() if type(it) is int}
    return settings | counts | {key: 0.5 for key, it in settings.items() if it == 0.125}


class Asked:
    """What an engine may be asked for; each answer is a row of the report.

    Args:
        llm: The engine.
        vocabulary: Tokens that there are.
    """

    def __init__(self, llm: "LLM", vocabulary: int) -> None:
        self.llm, self._vocabulary = llm, vocabulary
        self.is_ours = llm.collective_rpc(_is_ours)[0]
        self._random = torch.Generator().manual_seed(0)

    def generate(
        self, n: int, length: int, out: int, extra: Row | None = None, repeats: int = 1
    ) -> Row:
        """Answers `n` prompts at once, `repeats` times; medians of all numbers."""
        n, repeats = min(n, MOST), min(repeats, MOST)
        runs = [self._generate(n, length, out, extra or {}) for _ in range(repeats)]
        row: Row = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        said = "{seconds:.2f} s, first token after {first_s:.3f} to {last_s:.3f} s, then "
        said += "{token_ms:.2f} ms each, {running:.0f} at once, {usage:.0%} of the blocks"
        if row["peak_gib"]:
            said += ", {peak_gib:.2f} GiB beside the standing"
        what = f"{n} x {length:,} -> {out:,}" + (f", {_named(extra)}" if extra else "")
        return {"what": what, "result": said.format(**row)} | row

    def _generate(self, n: int, length: int, out: int, extra: Row) -> dict[str, float]:
        out = min(out, 4 * MOST)
        before, started = self._dropped(), self._metric("num_preemptions")
        (standing,) = self.llm.collective_rpc(_held)
        done, seen = Event(), [(0.0, 0.0)]
        watching = Thread(target=self._watch, args=(done, seen))
        watching.start()
        start = time.perf_counter()
        outputs = self._answer([self._prompt(length) for _ in range(n)], out, extra)
        seconds = time.perf_counter() - start
        done.set()
        watching.join()
        dropped = self._dropped() - before
        if self.is_ours and (dropped > 0) == (extra == KEPT):
            raise BenchmarkError(f"{dropped:.0f} of {n} prompts had entries dropped")
        times = [output.metrics for output in outputs]
        (peak, reserved) = self.llm.collective_rpc(_most_held)[0]
        return {
            "seconds": seconds,
            "first_s": min(each.first_token_latency for each in times),
            "last_s": max(each.first_token_latency for each in times),
            "token_ms": 1e3
            * statistics.fmean(each.last_token_ts - each.first_token_ts for each in times)
            / (out - 1),
            "usage": max(usage for usage, _ in seen),
            "running": max(running for _, running in seen),
            "preempted": self._metric("num_preemptions") - started,
            "dropped": dropped,
            "peak_gib": (peak - standing) / 2**30,
            "reserved_gib": reserved / 2**30,
        }

    def documents(self, n: int, length: int, rounds: int) -> Row:
        """Asks about one document after the other, round after round, each request alone."""
        documents = [self._prompt(length) for _ in range(min(n, MOST))]
        marked = {"kv_eviction_context": length} if self.is_ours else {}
        firsts: list[list[float]] = [[] for _ in range(rounds)]
        start = time.perf_counter()
        for found in firsts:
            for document in documents:
                asked = [document + self._prompt(64, shortest=2)]
                (output,) = self._answer(asked, min(16, 4 * MOST), marked)
                found.append(output.metrics.first_token_latency)
        numbers = [statistics.median(found) for found in firsts]
        said = ", ".join(f"{1e3 * each:.0f} ms" for each in numbers)
        return {
            "what": f"{n} documents of {length:,} in turn",
            "result": f"first token by round {said}",
            "seconds": time.perf_counter() - start,
            "first_s": numbers,
        }

    def sessions(self, n: int, length: int, turn: int, turns: int, out: int) -> Row:
        """Agents whose prompts grow by an answer and a tool's output with every turn."""
        histories = [self._prompt(length) for _ in range(min(n, MOST))]
        computed, asked, firsts = 0, 0, list[float]()
        start = time.perf_counter()
        for _ in range(min(turns, MOST)):
            for index, output in enumerate(self._answer(histories, min(out, 4 * MOST), {})):
                asked += len(histories[index])
                computed += len(histories[index]) - (output.num_cached_tokens or 0)
                firsts.append(output.metrics.first_token_latency)
                histories[index] += [*output.outputs[0].token_ids, *self._prompt(turn, shortest=2)]
        seconds, first = time.perf_counter() - start, statistics.median(firsts)
        said = f"{seconds:.1f} s, {computed:,} of {asked:,} prompt tokens computed"
        return {
            "what": f"{n} agents of {length:,}, {turns} turns of {turn:,}",
            "result": f"{said}, first token after {first:.3f} s",
            "seconds": seconds,
            "computed": computed,
            "first_s": first,
        }

    def read(self, extra: Row | None = None, alone: bool = False) -> Row:
        """Reads given answers to prompts that are the same in every engine: nats of each token."""
        random, num_given = torch.Generator().manual_seed(7), min(64, 4 * MOST)
        prompts = [self._prompt(length, random) for length in READ]
        given = [self._prompt(SHRINK * num_given, random, 2) for _ in prompts]
        empty_prefix_cache(self.llm)
        asked = [{**(extra or {}), ANSWER_KEY: answer} for answer in given]
        groups = [[index] for index in range(len(READ))] if alone else [[*range(len(READ))]]
        nats: list[float] = []
        for group in groups:
            texts, extras = [prompts[each] for each in group], [asked[each] for each in group]
            for output in self._answer(texts, num_given, extras, logprobs=0):
                (answer,) = output.outputs
                pairs = zip(answer.token_ids, answer.logprobs, strict=True)
                nats += [-found[token].logprob for token, found in pairs]
        what = f"given answers, {_named(extra) if extra else 'as served'}"
        said = f"{statistics.fmean(nats):.4f} nats a token"
        return {"what": what, "result": said, "nats": nats}

    def draft(self, extra: Row | None = None) -> Row:
        """Generates freely from the same prompts in every engine, and counts drafted tokens."""
        random = torch.Generator().manual_seed(8)
        prompts = [self._prompt(length, random) for length in READ]
        empty_prefix_cache(self.llm)
        start = time.perf_counter()
        outputs = self._answer(prompts, min(64, 4 * MOST), extra or {})
        seconds = time.perf_counter() - start
        drafted, accepted = map(self._metric, DRAFTED)
        return {
            "what": f"{len(READ)} prompts",
            "result": f"{seconds:.2f} s, {accepted:.0f} of {drafted:.0f} drafted tokens accepted",
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

    def _prompt(
        self, length: int, random: torch.Generator | None = None, shortest: int = SHORTEST
    ) -> list[int]:
        length = max(shortest, length // SHRINK)
        random = random or self._random
        return torch.randint(self._vocabulary, (length,), generator=random).tolist()

    def _answer(
        self,
        prompts: Sequence[list[int]],
        out: int,
        extra: Row | list[Row],
        logprobs: int | None = None,
    ) -> "list[RequestOutput]":
        from vllm import SamplingParams

        extras = extra if isinstance(extra, list) else [extra] * len(prompts)
        params = [
            SamplingParams(
                max_tokens=out,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
                extra_args=shrunk(each),
            )
            for each in extras
        ]
        texts: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(texts, params, use_tqdm=False)

    def _metric(self, name: str) -> float:
        return sum(
            getattr(each, "value", 0.0)
            for each in self.llm.get_metrics()
            if each.name == f"vllm:{name}"
        )

    def _dropped(self) -> float:
        """Requests of which entries were dropped."""
        stats = self.llm.collective_rpc("kv_eviction_stats")[0] if self.is_ours else {}
        return stats.get("num_evicted", 0.0)

    def _watch(self, done: Event, seen: list[tuple[float, float]]) -> None:
        """Notes the share of blocks held and how many requests run, five times a second."""
        while not done.wait(0.2):
            seen.append((self._metric("kv_cache_usage_perc"), self._metric("num_requests_running")))


KEPT: Row = {"kv_eviction_budget": 1.0}
DRAFTED = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


def _named(extra: Row) -> str:
    """A request's own settings in words."""
    short = {key.removeprefix("kv_").removeprefix("eviction_"): it for key, it in extra.items()}
    return ", ".join(f"{key} {it}" for key, it in short.items())


def _is_ours(worker: Any) -> bool:
    return hasattr(worker, "kv_eviction_stats")


def _held(worker: Any) -> int:
    """Bytes that a worker's tensors take, from when on the most is noted; without a card 0."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats(worker.device)
    return torch.cuda.memory_allocated(worker.device)


def _most_held(worker: Any) -> tuple[int, int]:
    """The most that they took since, and what is reserved beside the cache; without a card 0."""
    if not torch.cuda.is_available():
        return 0, 0
    reserve = getattr(worker, "_reserved_bytes", lambda _: 0)
    size = worker.cache_config.kv_cache_memory_bytes or 0
    return torch.cuda.max_memory_allocated(worker.device), reserve(size)


if __name__ == "__main__":
    run_child(make_ready)
