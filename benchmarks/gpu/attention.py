"""Decode attention on a GPU: the one-head view against stock calls, on equal bytes and in full.

One layer of an 8B Llama in bfloat16, vLLM's own kernel and cache layout. Heads retain equally many
entries, or as unequally as AdaKV lets them (log-normal, the same sum). Of the last block all read
one entry, as the view's tail holds one: so there are as many tiles. The view's time includes its
page table. Events time the device, with a cold cache.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _device import DEVICE, attention_call, row
from _timing import copy_bandwidth, median_time

from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.paging.page_table import headwise_page_table as reference

KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 8, 4, 128, 16
ENTRY_BYTES = 2 * HEAD_SIZE * 2
FULL = 8
"""The full cache holds as many times what is retained."""


def main(
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32,128",
    retained: Annotated[str, typer.Option(help="Entries per head.")] = "256,1024,4096,8192",
    rounds: Annotated[int, typer.Option(min=1, help="Calls; the median.")] = 9,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Small, by a stand-in.")] = False,
) -> None:
    """Times every batch size and budget, and prints a table and one JSON line."""
    if dry_run:
        batches, retained, rounds = "1,2", "64", 1
    elif not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU")
    bandwidth, results = copy_bandwidth(), []
    table = Table("batch", "retained", "stock", "view, even", "view, uneven", "full", "of copying")
    for batch in map(int, batches.split(",")):
        for asked in map(int, retained.split(",")):
            length = asked - BLOCK_SIZE + 1
            runs = {
                "stock": stock(batch, length),
                "even": one_head(batch, length, uneven=False),
                "uneven": one_head(batch, length, uneven=True),
            }
            if FULL * batch * asked * KV_HEADS * ENTRY_BYTES < 2**35:
                runs["full"] = stock(batch, FULL * asked)
            seconds = {name: median_time(run, rounds) for name, run in runs.items()}
            floor = batch * length * KV_HEADS * ENTRY_BYTES / bandwidth
            results.append({"batch": batch, "retained": length, "floor": floor, **seconds})
            full = seconds.get("full")
            row(
                f"decode, batch {batch}, {length} entries a head: stock, view even and uneven",
                ", ".join(f"{seconds[name] * 1e6:.0f} us" for name in runs),
            )
            table.add_row(
                str(batch),
                str(length),
                f"{seconds['stock'] * 1e6:.1f} us",
                *(
                    f"{seconds[name] * 1e6:.1f} us ({seconds['stock'] / seconds[name]:.2f}x)"
                    for name in ("even", "uneven")
                ),
                f"{full * 1e6:.1f} us" if full else "",
                f"{floor / seconds['uneven']:.0%}",
            )
    Console(width=110).print(table)
    print(json.dumps({"copy_bandwidth": bandwidth, "attention": results}))


def stock(batch: int, length: int) -> Callable[[], object]:
    """vLLM's call for a batch of decodes."""
    num_blocks = batch * -(-length // BLOCK_SIZE)
    cache = random_cache(num_blocks)
    key, value = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    blocks = torch.randperm(num_blocks, device=DEVICE).int().view(batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    query = torch.randn(batch, KV_HEADS * GROUP, HEAD_SIZE, device=DEVICE).bfloat16()
    return attention(query, key, value, blocks, lengths, length)


def one_head(batch: int, length: int, uneven: bool) -> Callable[[], object]:
    """The view's call, after the kernel that builds its page table; the tail holds one entry."""
    from vllm_kvselect.engine.cuda.layer import one_head_view

    num_packed = length // BLOCK_SIZE
    cache = random_cache(1 + batch * (num_packed + 1))
    key, value = one_head_view(cache, HEAD_SIZE)
    ids = torch.randperm(len(cache) - 1, device=DEVICE).int() + 1
    block_table = ids.view(batch, num_packed + 1)
    shares = torch.randn(batch, KV_HEADS).mul_(1.0 if uneven else 0.0).exp_()
    ends = (shares.cumsum(1) / shares.sum(1, keepdim=True) * num_packed * KV_HEADS).round()
    offsets = torch.nn.functional.pad(ends, (1, 0)).int().to(DEVICE)[None]
    first, tail = (torch.full((batch,), n, device=DEVICE).int() for n in (0, num_packed))
    seq_lens = tail * BLOCK_SIZE + 1
    longest = int(offsets.diff().max()) * BLOCK_SIZE + 1
    out = PageTable(
        torch.zeros(1, batch * KV_HEADS, longest // BLOCK_SIZE + 1, device=DEVICE).int(),
        torch.zeros(1, batch * KV_HEADS, device=DEVICE).int(),
    )
    arguments = (block_table, seq_lens, first, tail, offsets, BLOCK_SIZE, len(cache), 0, out)
    query = torch.randn(batch * KV_HEADS, GROUP, HEAD_SIZE, device=DEVICE).bfloat16()
    attend = attention(query, key, value, out.pages[0], out.seq_lens[0], longest)

    headwise_page_table = reference
    if DEVICE == "cuda":
        from vllm_kvselect.kernels import cuda

        headwise_page_table = cuda.headwise_page_table

    def run() -> None:
        headwise_page_table(*arguments)
        attend()

    return run


def random_cache(num_blocks: int) -> torch.Tensor:
    """A layer's cache in the layout LBHNC, in memory of its own."""
    shape = num_blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
) -> Callable[[], Any]:
    """FlashAttention as vLLM calls it for one query a sequence."""
    return partial(
        attention_call("FLASH_ATTN"),
        q=query,
        k=key,
        v=value,
        out=torch.empty_like(query),
        cu_seqlens_q=torch.arange(len(lengths) + 1, device=DEVICE).int(),
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=longest,
        softmax_scale=HEAD_SIZE**-0.5,
        causal=True,
        block_table=pages,
    )


if __name__ == "__main__":
    typer.run(main)
