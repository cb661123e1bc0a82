"""Proofs on a GPU that need no model of the kit's: the same attention, and real answers over HTTP.

`view`: the one-head view gives what the stock call gives on the same entries, also where pages lie
beyond 2^31 elements. `served`: the small real model finds needles behind `vllm serve`, by
`vllm-kvselect evaluate`, which compares the server's metrics with what should have been dropped.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _children import Answers, Row, run_child
from _device import DEVICE, HAS_CARD, attention_call
from _engine import BenchmarkError, Job, default_model

from vllm_kvselect.paging.compaction import head_pages

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN") if HAS_CARD else ("",)
LENGTHS, EXAMPLES, BUDGET = ("1900,4000,7000", 8, 0.125) if HAS_CARD else ("1000", 4, 0.25)
CUTS = "layer-probe,layer-probe:prompt_interval=512"


def view(job: Job) -> tuple[Row, Answers]:
    """Compares the view with the stock call, low in the cache and high."""
    from vllm_kvselect.engine.cuda.layer import one_head_view

    heads, group, head_size = (8, 4, 128) if HAS_CARD else (2, 2, 32)
    size, batch, length = 16, 4, 1000 if HAS_CARD else 70
    element = torch.bfloat16 if HAS_CARD else torch.float32
    num_blocks = (9 * 2**28 if HAS_CARD else 2**20) // (heads * size * 2 * head_size)
    cache = torch.empty(num_blocks, heads, size, 2 * head_size, dtype=element, device=DEVICE)
    used = batch * -(-length // size)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    query = torch.randn(batch, heads * group, head_size, device=DEVICE).to(element)
    found = []
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
            found.append(f"{backend or 'stand-in'}, {place}: off by {worst:.1e} at most")
    row = {"what": "the view against the stock call", "result": "; ".join(found)}
    return row, lambda command: row


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


def served(job: Job) -> tuple[Row, Answers]:
    """Starts `vllm serve` with the small model, in this process's group, with which it ends."""
    model = default_model()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", port]
    command += ["--host", "127.0.0.1", "--max-model-len", "8192", "--generation-config", "vllm"]
    command += ["--kv-eviction", "none", "--kv-cache-memory-bytes", "2G"]
    command += ["--kv-eviction-allow-override", "method,budget,context,prompt_interval"]
    command += ["--gpu-memory-utilization", "0.02"] if HAS_CARD else ["--enforce-eager"]
    server = subprocess.Popen(command + ([] if HAS_CARD else ["--dtype", "float32"]))
    url = f"http://127.0.0.1:{port}"
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            break
        if server.poll() is not None:
            raise BenchmarkError("`vllm serve` has ended")
        time.sleep(0.5)
    return {"what": "ready", "result": model}, lambda command: needles(model, url)


def needles(model: str, url: str) -> Row:
    """Asks for hidden numbers, with the full cache and after eviction, many at once."""
    with tempfile.TemporaryDirectory() as folder:
        start = "from vllm_kvselect.cli import app; app()"
        command = [sys.executable, "-c", start, "evaluate", "needles", "--model", model]
        command += ["--url", url, "--through", "engine", "--methods", CUTS, "--out", folder]
        command += ["--budgets", str(BUDGET)]
        command += ["--lengths", LENGTHS, "--num-examples", str(EXAMPLES)]
        command += ["--scenarios", "regular,context-only"]
        subprocess.run(command, stdout=sys.stderr, check=True)
        rows = json.loads((Path(folder) / "scores.json").read_text())["rows"]
    found: dict[str, list[float]] = {}
    for row in rows:
        name = f"{row['method']}, {row['scenario']}"
        found.setdefault(name, []).append(row["scores"]["needle"] * row["num_examples"]["needle"])
    asked = EXAMPLES * len(LENGTHS.split(","))
    said = "; ".join(f"{name} {sum(each):.0f}" for name, each in found.items())
    most = max(map(sum, found.values()))
    if min(map(sum, found.values())) < most - max(1, 0.15 * asked) or most < 0.9 * asked:
        raise BenchmarkError(f"of {asked} needles were found: {said}")
    return {"what": f"needles found over HTTP, of {asked}", "result": said}


if __name__ == "__main__":
    run_child(lambda job: {"view": view, "served": served}[job["kind"]](job))
