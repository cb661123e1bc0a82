"""FlashAttention 3's own operator, which takes the sequences of a call in any order.

Each reads and writes where `cu_seqlens_q` says, if `seqused_q` says how many queries it has. vLLM's
function passes no such lengths, so what it is asked goes to the operator below it. How sequences
are shared out the operator finds out by a kernel before each call, unless it is told.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backends import flash_attn

from vllm_kvselect.engine.log import logger
from vllm_kvselect.paging.order import MOST_SHARED, MOST_VECTORS, Orders, Schedules, Sharing, padded

LENGTHS = (40, 700, 1, 0, 333, 512)
"""Entries of the sequences of a trial."""

SHARED = (
    tuple(range(1, 257, 16)),  # as many are one tile as it has sixteens of entries
    (129, 130_000, 0, 20_000, 3),
    tuple(37 * i % 5000 for i in range(MOST_SHARED)),
)
"""Entries of sequences whose schedules are compared."""

_NOT_USED = dict.fromkeys(
    (
        "k_new",
        "v_new",
        "q_v",
        "cu_seqlens_k",
        "cu_seqlens_k_new",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "rotary_sin",
        "seqlens_rotary",
        "pack_gqa",
        "cp_tot_seqused_k",
    )
)
_CONSTANT = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
_RENAMED = {"block_table": "page_table", "causal": "is_causal"}
"""What vLLM's function calls otherwise; `fa_version` it keeps to itself."""


def attend(given: Mapping[str, Any], sequences: torch.Tensor, num_queries: torch.Tensor) -> None:
    """Attention of one query a sequence.

    Args:
        given: What vLLM's function is given, rows of the table and lengths in order of `sequences`.
        sequences: The sequence of each row, `[n + 1]` int32: which queries it has, and outputs.
        num_queries: Ones, `[n]` int32.
    """
    own = {_RENAMED.get(name, name): part for name, part in given.items() if name != "fa_version"}
    own |= {"cu_seqlens_q": sequences, "seqused_q": num_queries}
    torch.ops._vllm_fa3_C.fwd(**{**_NOT_USED, **_CONSTANT, **own})


class Trial(NamedTuple):
    """What the operator is asked before anything depends on it.

    Data types are of queries and of what is written; `constants` is what else vLLM's function is
    given for `len(LENGTHS)` sequences.
    """

    group: int
    head_size: int
    page_size: int
    dtypes: tuple[torch.dtype, torch.dtype]
    device: torch.device
    constants: Mapping[str, Any]
    longest_first: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Orders], None]

    def takes_any_order(self, sharing: Sharing | None = None) -> bool:
        """Whether the operator gives, bit for bit, what vLLM's function gives in order.

        It is told how to share sequences out, or finds out where it is not.
        """
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            return False
        generator, n = torch.Generator().manual_seed(0), len(LENGTHS)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtypes[0])

        pages = torch.randperm(n * -(-max(LENGTHS) // self.page_size), generator=generator)
        pages = pages.int().view(n, -1).to(self.device)
        orders = self._orders(LENGTHS, sharing)
        query = drawn(n, self.group, self.head_size)
        outputs = query.new_full((2, *query.shape), torch.nan, dtype=self.dtypes[1])
        schedules = orders.schedules
        given = {
            "q": query,
            "k": drawn(pages.numel(), self.page_size, 1, self.head_size),
            "v": drawn(pages.numel(), self.page_size, 1, self.head_size),
            "max_seqlen_q": 1,
            "max_seqlen_k": max(LENGTHS),
            "num_splits": 0 if sharing is None else sharing.most_parts,
            "s_aux": None,
            **self.constants,
        }
        flash_attn.flash_attn_varlen_func(
            **given,
            out=outputs[0],
            cu_seqlens_q=self._integers(range(n + 1)),
            seqused_k=self._integers(LENGTHS),
            block_table=pages,
        )
        given |= {
            "out": outputs[1],
            "seqused_k": orders.seq_lens[0],
            "block_table": pages[orders.sequences[0, :-1].long()],
            "scheduler_metadata": None if schedules is None else schedules.numbers[0],
        }
        try:
            attend(given, orders.sequences[0], self._integers([1] * n))
        except RuntimeError as error:  # another release's operator
            logger.warning("KV eviction reads heads in the order of the batch: %s", error)
            return False
        return torch.equal(*outputs)

    def sharing(self, most_parts: int) -> Sharing | None:
        """How the operator shares out sequences, each in `most_parts` at most; None if unknown."""
        own = [self._schedule(lengths, most_parts) for lengths in SHARED]
        num_vectors, tile = len(own[0]) - 1, 16 * max(own[0][1].count(1), 1)
        sharing = Sharing(tile, num_compute_units(self.device.index), most_parts, num_vectors)
        if (
            1 < num_vectors <= MOST_VECTORS
            and own == [self._schedule(lengths, most_parts, sharing) for lengths in SHARED]
            and self.takes_any_order(sharing)
        ):
            return sharing
        logger.warning("KV eviction leaves schedules to FlashAttention, which makes others")
        return None

    def _schedule(
        self, lengths: Sequence[int], most_parts: int, sharing: Sharing | None = None
    ) -> list[list[int]]:
        """The vectors of a schedule and its end: the operator's own, or the one for `sharing`."""
        n, orders = len(lengths), self._orders(lengths, sharing)
        if orders.schedules is not None:
            numbers = orders.schedules.numbers[0]
        else:
            numbers = flash_attn.get_scheduler_metadata(
                batch_size=n,
                max_seqlen_q=1,
                max_seqlen_k=max(lengths),
                num_heads_q=self.group,
                num_heads_kv=1,
                headdim=self.head_size,
                cache_seqlens=orders.seq_lens[0],
                qkv_dtype=self.dtypes[0],
                cu_seqlens_q=self._integers(range(n + 1)),
                page_size=self.page_size,
                causal=True,
                num_splits=most_parts,
            )
        return [vector[:n].tolist() for vector in numbers.split(padded(n))]

    def _orders(self, lengths: Sequence[int], sharing: Sharing | None) -> Orders:
        """The order of sequences of so many entries, all of them in their tails."""
        n = len(lengths)
        zeros = partial(torch.zeros, dtype=torch.int32, device=self.device)
        schedules = None if sharing is None else Schedules(zeros(1, sharing.size(n)), sharing)
        orders = Orders(zeros(1, n + 1), zeros(1, n), schedules)
        given = self._integers(lengths), zeros(n), zeros(1, n, 2), self.page_size
        self.longest_first(*given, orders)
        return orders

    def _integers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)
