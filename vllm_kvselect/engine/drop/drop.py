"""Drop: cuts of requests with equal settings, made in all layers at once.

What competes are columns: of a prompt its tokens, later the entries that earlier cuts retained and
those behind them. A cut is made at the beginning of the step after the one that reaches it, before
anything of that step is written: so no token waits for it that was computed before.

A drafter's layers choose nothing: they retain what layers of the target do (`followed_layers`). So
no method needs anything of them, and what the target retains is what it would be without a drafter.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.choice import Retention, Sizes, choose, score
from vllm_kvselect.engine.drop.columns import Columns
from vllm_kvselect.engine.drop.following import following_candidates
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.scoring.held import Held, HeldLayer, Paged
from vllm_kvselect.selecting.ranking import Candidates


class DropLayer(HeldLayer, Protocol):
    """What a drop needs of a layer; `HeadwiseImpl` is one. Pages count through all layers."""

    layer_index: int
    kernels: Kernels

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Pages of all layers as kernels read them, `[num_pages, page_size, 2 * head_size]`.

        Beside them, what their bytes stand for in this layer, `[2, 256]`, or None. None where no
        kernel reads them.
        """

    def move(
        self,
        pages: torch.Tensor,
        retained: torch.Tensor,
        num_competing: int,
        packed_blocks: torch.Tensor,
    ) -> None:
        """Moves what is retained within the memory of all layers; see `move_retained`."""


class Drop:
    """The next cuts of some requests with equal settings."""

    def __init__(
        self,
        requests: Sequence[Request],
        layers: Sequence[DropLayer],
        state: RetentionState,
        page_size: int,
        make_paged: Callable[[], Paged] | None = None,
    ) -> None:
        self.requests, self.settings = requests, requests[0].plan.settings
        self.cuts = [each.next_cut for each in requests if each.next_cut is not None]
        self.columns = Columns.of(requests, page_size, state)
        self._layers, self._state, self._page_size = layers, state, page_size
        self._is_pooled = requests[0].method.pooled
        self._make_paged = make_paged

    @property
    def keys(self) -> list[int]:
        """Ids of the first packed blocks, by which the state knows what is retained."""
        return [request.progress.swap.fresh[0] for request in self.requests]

    def make(self) -> None:
        """Makes the cuts in all layers, from what is in the cache."""
        held = self._held()
        candidates = self.candidates(held)
        retention = self.retention(held, candidates)
        num_kv_heads = self._state.num_kv_heads
        # [num_layers * num_kv_heads + 1] -> [num_layers, num_kv_heads + 1], ends shared
        offsets = retention.offsets.unfold(1, num_kv_heads + 1, num_kv_heads)
        num_choosing = self._state.num_choosing
        choosing = slice(0, num_choosing)
        if self._are_numbers_read_again:
            kept = candidates.scores.flatten()[retention.retained]
            self._state.keep_numbers(self._packed_blocks(choosing), kept)
        self._move(retention.retained, choosing)
        if self._state.followed:
            retained, of_followers = self._follow(candidates, retention)
            self._move(retained, slice(num_choosing, self._state.num_layers))
            offsets = torch.cat((offsets, of_followers), dim=1)
        keys = async_tensor_h2d(np.array(self.keys, np.int64), self._device)
        self._state.store(keys, offsets)
        self._state.complete([*zip(self.requests, self.cuts, strict=True)], keys)

    def candidates(self, held: Held) -> Candidates:
        """What competes."""
        return score(held, self.settings, self._layers[0].kernels)

    def retention(self, held: Held | None, candidates: Candidates) -> Retention:
        """What is retained of it."""
        sizes = Sizes([cut.num_packed for cut in self.cuts], self._page_size)
        return choose(held, candidates, sizes, self.settings, self._layers[0].kernels)

    @property
    def _device(self) -> torch.device:
        return self._state.offsets.device

    def _held(self) -> Held:
        """What the requests hold in the layers that choose."""
        columns, choosing = self.columns, slice(0, self._state.num_choosing)
        num_absent = columns.num_absent[:, choosing].flatten(0, 1)
        numbers, fresh, positions = None, columns.num_missing, [0] * len(self.requests)
        if self.requests[0].method.scorer.keeps_scores:
            fresh = columns.num_packed
            made = [request.last_cut for request in self.requests]
            positions = [cut.tail_start * self._page_size if cut else 0 for cut in made]
            if any(made):
                assert self._state.numbers is not None
                num_pages = columns.num_competing // self._page_size
                pages = columns.pages[:, choosing, :, :num_pages].flatten(0, 1)
                numbers = self._state.numbers[pages].flatten(2)
        return Held(
            self._layers,
            columns.pages[:, choosing].flatten(0, 1),
            num_absent.contiguous(),
            columns.num_competing,
            self._page_size,
            columns.num_missing,
            columns.behind,
            columns.is_even,
            self._queries(),
            numbers,
            fresh,
            positions,
            self._make_paged,
        )

    def _queries(self) -> torch.Tensor | None:
        """Those that the cuts look through; see `Held`."""
        begins = [
            request.first_query(cut) for request, cut in zip(self.requests, self.cuts, strict=True)
        ]
        window = self.cuts[0].position - begins[0]
        if not window:
            return None
        parts = [
            part
            for request, cut, begin in zip(self.requests, self.cuts, begins, strict=True)
            for part in request.progress.queries.between(begin, cut.position)
        ]
        # [num_layers, num_requests * window, ...] -> [num_requests, num_layers, window, ...]
        queries = torch.cat(parts, dim=1)[: self._state.num_choosing]
        return queries.unflatten(1, (len(self.requests), window)).transpose(0, 1)

    def _move(self, retained: torch.Tensor, layers: slice) -> None:
        """Moves what some layers retain into their packed blocks.

        Args:
            retained: `(row * num_kv_heads + head) * num_competing + column`, rows of these layers
                alone, ascending, `[n]` int64.
            layers: The layers.
        """
        packed_blocks = self._packed_blocks(layers)
        pages = self.columns.pages[:, layers].flatten(0, 2)
        self._layers[0].move(pages, retained, self.columns.num_competing, packed_blocks)

    def _packed_blocks(self, layers: slice) -> torch.Tensor:
        """The fresh blocks of some layers in the memory of all, request by request."""
        places = np.arange(layers.start, layers.stop)[:, None] * len(self._state.offsets)
        blocks = [
            (places + np.array(request.progress.swap.fresh)).ravel() for request in self.requests
        ]
        return async_tensor_h2d(np.concatenate(blocks), self._device)

    @property
    def _are_numbers_read_again(self) -> bool:
        """Whether another cut of a request, or of one that goes on from its state, reads them."""
        if self._state.numbers is None or not self.requests[0].method.scorer.keeps_scores:
            return False
        return any(
            cut is not request.plan.cuts[-1] or request.progress.num_made < request.plan.num_states
            for request, cut in zip(self.requests, self.cuts, strict=True)
        )

    def _follow(
        self, candidates: Candidates, retention: Retention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layers retain that follow others, and where their heads' pages start.

        Where layers share pages, these share theirs among themselves: what the followed ones retain
        might not fit.
        """
        state, num_columns = self._state, self.columns.num_competing
        num_choosing, num_kv_heads = state.num_choosing, state.num_kv_heads
        num_following = len(state.followed)
        per_page = num_kv_heads * self._page_size
        retained, offsets, begin = [], [], 0
        for index, cut in enumerate(self.cuts):
            end = begin + cut.num_packed * num_choosing * per_page
            if self._is_pooled:
                kept, starts = self._follow_together(index, candidates)
            else:
                owners = np.array(
                    [
                        (place - index * num_choosing - followed) * num_kv_heads * num_columns
                        for place, followed in enumerate(state.followed)
                    ]
                )
                by_layer = retention.retained[begin:end].view(num_choosing, -1)[state.followed]
                kept = (by_layer + torch.from_numpy(owners).to(self._device)[:, None]).flatten()
                runs = retention.offsets[index].unfold(0, num_kv_heads + 1, num_kv_heads)
                starts = runs[state.followed] - runs[state.followed][:, :1]
                shares = torch.arange(num_following, device=self._device)[:, None]
                starts = starts + shares * (cut.num_packed * num_kv_heads)
            retained.append(kept + index * num_following * num_kv_heads * num_columns)
            offsets.append(starts + num_choosing * cut.num_packed * num_kv_heads)
            begin = end
        return torch.cat(retained), torch.stack(offsets)

    def _follow_together(
        self, index: int, candidates: Candidates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the following layers of a request retain, and their heads' starts, from 0."""
        columns, state, request = self.columns, self._state, self.requests[index]
        rows = slice(index * state.num_choosing, (index + 1) * state.num_choosing)
        missing = columns.num_missing[index]
        own = Candidates.of(
            None if part is None else part[rows, :, missing:] for part in (*candidates[:3], None)
        )
        absent = None
        if not columns.is_even:
            absent = columns.num_absent[index, state.num_choosing :] - missing
        followed, num_packed = request.progress.followed, columns.num_packed[index] - missing
        found = following_candidates(own, state.followed, followed, absent, num_packed)
        sizes = Sizes([self.cuts[index].num_packed], self._page_size)
        retention = choose(None, found, sizes, self.settings, self._layers[0].kernels)
        is_last = self.cuts[index] is request.plan.cuts[-1]
        request.progress.followed = None if is_last else found.of_entries(retention.retained)
        num_own = columns.num_competing - missing
        owner, column = retention.retained // num_own, retention.retained % num_own
        num_kv_heads = state.num_kv_heads
        starts = retention.offsets[0].unfold(0, num_kv_heads + 1, num_kv_heads)
        return owner * columns.num_competing + column + missing, starts
