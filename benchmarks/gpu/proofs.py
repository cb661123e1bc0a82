"""Proofs on a GPU, before anything is measured: the same attention, the same tokens, enough memory.

`view`: the one-head view gives what the stock call gives on the same entries, also where pages lie
beyond 2^31 elements. `tokens`: an engine whose budget is above the prompts answers as stock does.
`memory`: entries are dropped, and what steps take beyond stock's stays below what is reserved.
"""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _device import DEVICE, HAS_CARD, attention_call, row
from _engine import CONFIG_KEY, BenchmarkError, Job, describe, run_child, run_script
from _models import FOUR_LAYERS, LLAMA_8B, TINY, write

from vllm_kvselect.paging.compaction import head_pages

NOT_LOADED = (
    "the plugin is not loaded: additional_config was ignored; install vllm-kvselect so that its "
    "entry point is visible (a dist-info on the path)"
)
NOTHING_DROPPED = "nothing was dropped: this engine is stock in all but name"
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN") if HAS_CARD else ("",)
MODES = {"eager": True, "graphs": False} if HAS_CARD else {"eager": True}
app = typer.Typer(add_completion=False)


@app.command()
def view() -> None:
    """Compares the view with the stock call, low in the cache and as high as memory allows."""
    # It loads vLLM, which whoever only starts children does without.
    from vllm_kvselect.engine.cuda.layer import one_head_view

    heads, group, head_size = (8, 4, 128) if HAS_CARD else (2, 2, 32)
    size, batch, length = 16, 4, 1000 if HAS_CARD else 70
    element = torch.bfloat16 if HAS_CARD else torch.float32
    free = torch.cuda.mem_get_info()[0] // 2 if HAS_CARD else 2**22
    num_blocks = free // (heads * size * 2 * head_size * element.itemsize)
    cache = torch.empty(num_blocks, heads, size, 2 * head_size, dtype=element, device=DEVICE)
    used = batch * -(-length // size)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    query = torch.randn(batch, heads * group, head_size, device=DEVICE).to(element)
    places = {"low": 1, f"beyond {cache.numel() / 2**31:.1f} x 2^31 elements": num_blocks - used}
    for place, first in places.items():
        cache[first : first + used].normal_()
        blocks = torch.randperm(used, device=DEVICE).int().view(batch, -1) + first
        for backend in BACKENDS:
            stock = attend(backend, query, *split(cache, head_size), blocks, lengths)
            pages = torch.cat([head_pages(each.long(), heads) for each in blocks]).int()
            by_head = query.view(batch * heads, group, head_size)
            ours = attend(
                backend,
                by_head,
                *one_head_view(cache, head_size),
                pages,
                lengths.repeat_interleave(heads),
            )
            worst = (ours.view_as(stock).float() - stock.float()).abs().max().item()
            # Twice the rounding of an output of about 1, by different orders of the sums.
            if not worst <= 2 * torch.finfo(element).eps * 8:
                raise BenchmarkError(f"{backend}, {place}: the view is off by {worst:.3g}")
            row(
                f"view against stock, {backend or 'stand-in'}, {place}",
                f"off by {worst:.1e} at most",
            )


def split(cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, ...]:
    """Keys and values as the stock call takes them, `[num_blocks, size, heads, head_size]`."""
    return cache.transpose(1, 2).split(head_size, dim=-1)


def attend(
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """One call, for one query a sequence."""
    out = torch.empty_like(query)
    attention_call(backend)(
        q=query,
        k=key,
        v=value,
        out=out,
        cu_seqlens_q=torch.arange(len(lengths) + 1, device=DEVICE).int(),
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=int(lengths.max()),
        softmax_scale=query.shape[-1] ** -0.5,
        causal=True,
        block_table=pages,
    )
    return out


@app.command()
def tokens() -> None:
    """Compares answers of stock with those of a budget above the prompts."""
    evictions = None, {"budget": 4000}
    with tempfile.TemporaryDirectory() as folder:
        write(folder, FOUR_LAYERS if HAS_CARD else TINY)

        def run(which: tuple[str, str, dict[str, int] | None]) -> dict[str, Any]:
            backend, mode, eviction = which
            job = {"model": folder, "eager": MODES[mode], "backend": backend, "cache_gib": 1}
            job |= {"lengths": [200, 333, 90], "eviction": eviction}
            return run_child(__file__, job, timeout=300)

        # All engines at once: starting one is the work of processor cores.
        jobs = list(product(BACKENDS, MODES, evictions))
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(run, jobs))
    for (backend, mode, _), stock, ours in zip(jobs[::2], found[::2], found[1::2], strict=True):
        refuse_stock(ours)
        pairs = zip(stock["answers"], ours["answers"], strict=True)
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
        # In graphs the view is another call: a rounding may turn a token, and all after it.
        if MODES[mode] and stock["answers"] != ours["answers"]:
            raise BenchmarkError(f"{backend}, {mode}: answers differ from stock's: {same}")
        total = sum(map(len, stock["answers"]))
        name = f"tokens against stock, {backend or 'CPU_ATTN'}, {mode}, vLLM {ours['vllm']}"
        row(name, f"{sum(same)} of {total} the same")


@app.command()
def memory() -> None:
    """Drops entries of long prompts; what a step takes beyond stock's against the reserve."""
    evictions = None, {"budget": 0.125}
    with tempfile.TemporaryDirectory() as folder:
        write(folder, LLAMA_8B if HAS_CARD else TINY)
        length = 16000 if HAS_CARD else 300
        job = {"model": folder, "eager": True, "backend": "", "cache_gib": 8}
        job |= {"lengths": [length, length]}
        with ThreadPoolExecutor() as pool:
            stock, found = pool.map(
                lambda eviction: run_child(__file__, {**job, "eviction": eviction}, timeout=200),
                evictions,
            )
    refuse_stock(found)
    if not found["num_evicted"]:
        raise BenchmarkError(NOTHING_DROPPED)
    row("prompts of which entries were dropped", f"{found['num_evicted']:.0f} of 2")
    taken, reserved = found["taken"] - stock["taken"], found["reserved"]
    if HAS_CARD and taken > reserved:
        raise BenchmarkError(f"{taken} bytes taken beyond stock's, {reserved} reserved")
    row(
        "memory that steps take at most beyond stock's, against the reserve",
        f"{taken / 2**20:.0f} of {reserved / 2**20:.0f} MiB",
    )


def refuse_stock(found: dict[str, Any]) -> None:
    """Stops if an engine that was asked for eviction has vLLM's own worker."""
    if not found["is_ours"]:
        raise BenchmarkError(NOT_LOADED)


def measure(job: Job) -> dict[str, Any]:
    """An engine's part, in a process of its own."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {}
    if job["eviction"] is not None:
        settings["additional_config"] = {CONFIG_KEY: job["eviction"]}
    if job["backend"]:
        settings["attention_backend"] = job["backend"]
    longest = max(job["lengths"]) + 64
    llm: LLM = LLM(
        job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=job["eager"],
        max_model_len=max(longest, 512),
        max_num_seqs=8,
        kv_cache_memory_bytes=(job["cache_gib"] * 2**30 if HAS_CARD else 2**25),
        gpu_memory_utilization=0.3,  # what has to be free at the start; others run beside it
        enable_prefix_caching=False,
        **settings,
    )
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(500, (n,), generator=random).tolist() for n in job["lengths"]]
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True, detokenize=False)
    (before,) = llm.collective_rpc(held)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    (after,) = llm.collective_rpc(most_held)
    (kind,) = llm.collective_rpc(worker_kind)
    is_ours = kind["is_ours"]
    stats = llm.collective_rpc("kv_eviction_stats")[0] if is_ours else {"num_evicted": 0}
    return {
        **describe(llm),
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "is_ours": is_ours,
        "num_evicted": stats["num_evicted"],
        "taken": after - before,
        "reserved": kind["reserved"],
    }


def held(worker: Any) -> int:
    """Bytes that a worker's tensors take, from when on the most is noted; without a card 0."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats(worker.device)
    return torch.cuda.memory_allocated(worker.device)


def most_held(worker: Any) -> int:
    """The most that they took since; without a card 0."""
    return torch.cuda.max_memory_allocated(worker.device) if torch.cuda.is_available() else 0


def worker_kind(worker: Any) -> dict[str, Any]:
    """Whether a worker is ours, and what it reserves beside the cache."""
    reserve = getattr(worker, "_reserved_bytes", None)
    size = worker.cache_config.kv_cache_memory_bytes or 0
    return {
        "is_ours": hasattr(worker, "kv_eviction_stats"),
        "reserved": reserve(size) if reserve else 0,
    }


if __name__ == "__main__":
    run_script(app, measure)
