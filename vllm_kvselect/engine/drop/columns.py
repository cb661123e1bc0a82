"""Columns: what requests hold when entries are dropped, aligned at the beginning of their tails."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.view.page_tables import SettledRows
from vllm_kvselect.paging.compaction import head_pages


@dataclass(frozen=True)
class Columns:
    """The entries of some requests up to their next cuts, as columns of pages.

    Columns that compete come first, as many as any head of any request has; a head that has fewer
    has none in the first ones. Each request's latest entries stand behind.

    Attributes:
        pages: Page ids in the memory of all layers, `[num_requests, num_layers, num_kv_heads, n]`
            int64; anything where a head has none.
        num_absent: First columns of each head without an entry, `[num_requests, num_layers,
            num_kv_heads]` int64.
        num_competing: Columns that compete.
        num_missing: Of each request, first columns that none of its heads has.
        num_packed: Of each request, columns up to the last of packed entries, those included.
        behind: Of each request, entries behind those that compete.
        is_even: Whether the heads of a request have the same entries, of which none was dropped.
    """

    pages: torch.Tensor
    num_absent: torch.Tensor
    num_competing: int
    num_missing: Sequence[int]
    num_packed: Sequence[int]
    behind: Sequence[int]
    is_even: bool

    @staticmethod
    def are_even(request: Request) -> bool:
        """Whether a column of a request is a token, at its next cut and for good."""
        return request.last_cut is None and request.plan.num_in_prompt == 1

    @staticmethod
    def num_own(request: Request, page_size: int) -> int:
        """Columns that compete at a request's next cut."""
        cut, last, run = request.next_cut, request.last_cut, request.progress.longest_run
        assert cut is not None
        num_run = 0 if run is None else int(run)
        return page_size * (cut.tail_start - (last.tail_start if last else 0) + num_run)

    @classmethod
    def of(cls, requests: Sequence[Request], page_size: int, state: RetentionState) -> "Columns":
        """What requests hold, which are all even or all not. Nothing here waits for a device."""
        own = [cls.num_own(request, page_size) for request in requests]
        num_competing = max(own)
        missing = [num_competing - each for each in own]
        cuts = [request.next_cut for request in requests if request.next_cut is not None]
        behind = [cut.position - cut.tail_start * page_size for cut in cuts]
        blocks = [
            request.progress.swap.given_back[: -(-cut.position // page_size)]
            for request, cut in zip(requests, cuts, strict=True)
        ]
        sizes = num_competing, missing
        if all(map(cls.are_even, requests)):
            width = num_competing // page_size + -(-max(behind) // page_size)
            table = np.zeros((len(requests), width), np.int64)
            for row, ids, none in zip(table, blocks, missing, strict=True):
                row[none // page_size :][: len(ids)] = ids
            table = async_tensor_h2d(table, state.offsets.device)
            num_blocks, num_layers, _ = state.offsets.shape
            layers = torch.arange(num_layers, device=table.device)[:, None]
            of_layers = (table[:, None] + layers * num_blocks)[:, :, None]
            pages = head_pages(of_layers, state.num_kv_heads)
            absent = async_tensor_h2d(np.array(missing, np.int64), table.device)
            num_absent = absent[:, None, None].expand(pages.shape[:3])
            return cls(pages, num_absent, *sizes, missing, behind, True)
        packed = [
            none + page_size * (0 if run is None else int(run))
            for none, run in zip(
                missing, (request.progress.longest_run for request in requests), strict=True
            )
        ]
        pages, num_absent = _uneven(requests, blocks, num_competing, max(behind), page_size, state)
        return cls(pages, num_absent, *sizes, packed, behind, False)


def _uneven(
    requests: Sequence[Request],
    blocks: Sequence[Sequence[int]],
    num_competing: int,
    most_behind: int,
    page_size: int,
    state: RetentionState,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and absent columns of requests that hold packed entries and what came after them."""
    device = state.offsets.device
    integers = np.zeros((5, len(requests)), np.int32)
    table = np.zeros((len(requests), max(map(len, blocks))), np.int32)
    for index, (request, ids) in enumerate(zip(requests, blocks, strict=True)):
        cut, last = request.next_cut, request.last_cut
        assert cut is not None
        first, tail = (last.first_packed, last.tail_start) if last else (0, 0)
        # Block 0 has no packed pages.
        key = ids[first] if last else 0
        integers[:, index] = cut.position, first, tail, key, len(ids) - cut.tail_start
        table[index, : len(ids)] = ids
    seq_len, first, tail, key, num_behind = async_tensor_h2d(integers, device)
    rows = SettledRows(async_tensor_h2d(table, device), seq_len, first, tail, key.to(torch.int64))
    num_columns = num_competing // page_size
    width = num_columns + -(-most_behind // page_size)
    pages, lengths = rows.page_table(state, page_size, width=width)
    # [num_layers, num_requests * num_kv_heads] -> [num_requests, num_layers, num_kv_heads]
    by_request = len(state.offsets[0]), len(requests), state.num_kv_heads
    lengths = lengths.to(torch.int64).view(by_request).transpose(0, 1)
    pages = pages.to(torch.int64).view(*by_request, width).transpose(0, 1)
    num_pages = -(-lengths // page_size) - num_behind.to(torch.int64)[:, None, None]
    num_missing = num_columns - num_pages
    columns = torch.arange(width, device=device) - num_missing[..., None]
    aligned = pages.gather(3, columns.clamp_(min=0))
    return aligned, num_missing * page_size
