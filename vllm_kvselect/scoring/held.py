"""Held: what requests hold when entries are dropped, in all layers at once, as rows.

A row is a layer of a request. Rows are request by request, layers in order. All heads of all rows
have the same columns that compete: a head with fewer entries has none in the first ones, so that
requests of different lengths are aligned at the beginning of their tails. Behind these columns each
request has its latest entries, which are retained anyway.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch

from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.numbers import on_device
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.scoring.value_norms import OutputProjection


class HeldLayer(Protocol):
    """What reads a layer's entries, and knows its constants."""

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        """What scorers may read of this layer."""

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of whole pages in their order, and values of the first of them at least.

        Args:
            pages: Page ids of each head, `[num_kv_heads, n]` int64.
            num_competing: Pages of which values are wanted.

        Returns:
            `[num_kv_heads, n * block_size, head_size]`, the values perhaps fewer.
        """


@dataclass(frozen=True)
class Paged:
    """The memory of all layers, and their constants stacked, for kernels that read through pages.

    Attributes:
        memory: `[num_pages, block_size, 2 * head_size]`, contiguous; keys and values side by side.
            Bytes where the cache is quantised.
        dtype: The type in which keys and values are scored.
        codes: What the bytes of a quantised cache stand for, of keys and of values, `[num_layers,
            2, 256]` of that type; None for the memory's own numbers.
        scales: Softmax scales, `[num_layers]` float32.
        sinks: Attention sinks, `[num_layers, num_heads]`, or None.
        probes: Weights of the probes, `[num_layers, num_kv_heads, num_features]` float32, or None.
        tables: Cosines and sines of the layers' rotations, `[num_tables, num_positions, n]` each;
            n is 0 where no layer rotates.
        table_of: Which of the tables a layer has, `[num_layers]` int32, -1 for none.
        interleaved: As of `Rotation`.
        projections: W_O, its fields stacked, or None.
    """

    memory: torch.Tensor
    dtype: torch.dtype
    codes: torch.Tensor | None
    scales: torch.Tensor
    sinks: torch.Tensor | None
    probes: torch.Tensor | None
    tables: tuple[torch.Tensor, torch.Tensor]
    table_of: torch.Tensor
    interleaved: bool
    projections: OutputProjection | None

    @classmethod
    def of(
        cls,
        layers: Sequence[ScoringInputs],
        memory: torch.Tensor,
        codes: torch.Tensor | None = None,
    ) -> Self:
        """Stacks the constants of layers, whose keys and values are not read."""
        first, device = layers[0], memory.device
        rotations: dict[tuple[object, object], Rotation] = {}
        places = []
        for rotation in (layer.rotation for layer in layers):
            if rotation is None:
                places.append(-1)
                continue
            memory_of = rotation.cos.untyped_storage()._cdata, rotation.cos.storage_offset()
            rotations.setdefault(memory_of, rotation)
            places.append([*rotations].index(memory_of))
        none = torch.empty(1, 1, 0, device=device)
        cos, sin = none, none
        if rotations:
            tables = rotations.values()
            cos, sin = (
                stacked([getattr(each, name) for each in tables]) for name in ("cos", "sin")
            )
        projection = None
        if all(layer.output_projection is not None for layer in layers):
            projection = OutputProjection(
                *(
                    stacked([getattr(layer.output_projection, name) for layer in layers])
                    for name in ("weight", "bound_form")
                )
            )
        sinks, probes = None, None
        if first.sinks is not None:
            sinks = stacked([layer.sinks for layer in layers if layer.sinks is not None])
        if first.probe is not None:
            parts = [layer.probe.T for layer in layers if layer.probe is not None]
            probes = stacked(parts).float().contiguous()
        return cls(
            memory,
            memory.dtype if codes is None else codes.dtype,
            codes,
            on_device(np.array([layer.scale for layer in layers], np.float32), device),
            sinks,
            probes,
            (cos, sin),
            on_device(np.array(places, np.int32), device),
            any(rotation.interleaved for rotation in rotations.values()),
            projection,
        )


@dataclass(frozen=True)
class Held:
    """What requests hold in all layers, and look through.

    Attributes:
        layers: The layers, in order.
        pages: Page ids in the memory of all layers, `[num_rows, num_kv_heads, n]` int64, of the
            columns from the first one on; anything where a head has none.
        num_absent: First columns of each head without an entry, `[num_rows, num_kv_heads]` int64.
        num_competing: Columns that compete.
        block_size: Entries per page.
        num_missing: Of each request, first columns that none of its heads has: the longest has 0.
        behind: Of each request, entries behind those that compete.
        is_even: Whether the heads of a request all have the same entries.
        query: Queries that the cuts look through, `[num_requests, num_layers, window, num_heads,
            head_size]`, heads of a token side by side; None where scorers need none.
        numbers: Numbers that the entries before `fresh` come with, `[num_rows, num_kv_heads,
            num_competing]`; None where none have any.
        fresh: Of each request, the column from which on entries come without a number.
        positions: Of each request, the position of the first of these.
        make_paged: Gives the memory for kernels that read through pages; None where none do.
    """

    layers: Sequence[HeldLayer]
    pages: torch.Tensor
    num_absent: torch.Tensor
    num_competing: int
    block_size: int
    num_missing: Sequence[int]
    behind: Sequence[int]
    is_even: bool
    query: torch.Tensor | None
    numbers: torch.Tensor | None
    fresh: Sequence[int]
    positions: Sequence[int]
    make_paged: Callable[[], Paged] | None = None

    @classmethod
    def of(cls, layers: Sequence[ScoringInputs]) -> Self:
        """What one request holds, given as tensors of its layers, in order.

        Shapes are the same in all. Values are of what competes.
        """
        first = layers[0]
        num_kv_heads, num_tokens, _ = first.key.shape
        num_competing = first.value.shape[1]
        device, is_even = first.key.device, first.num_absent is None
        absent = [layer.num_absent for layer in layers if layer.num_absent is not None]
        shape = len(layers), num_kv_heads
        num_absent = torch.zeros(shape, dtype=torch.int64, device=device)
        if not is_even:
            num_absent = torch.stack(absent)
        pages = torch.arange(len(layers) * num_kv_heads, device=device).view(*shape, 1)
        numbers, fresh = None, 0
        if first.numbers is not None:
            fresh = min(first.numbers.shape[1], num_competing)
            numbers = first.numbers.new_zeros(*shape, num_competing)
            for row, layer in zip(numbers, layers, strict=True):
                assert layer.numbers is not None
                row[:, :fresh] = layer.numbers[:, :fresh]
        return cls(
            [_Given(layer) for layer in layers],
            pages,
            num_absent,
            num_competing,
            num_tokens,
            [0],
            [num_tokens - num_competing],
            is_even,
            torch.stack([layer.query for layer in layers])[None],
            numbers,
            [fresh],
            [first.first_position],
            lambda: _paged(layers),
        )

    @property
    def num_layers(self) -> int:
        """Layers of a request."""
        return len(self.layers)

    @property
    def num_rows(self) -> int:
        """Layers of all requests."""
        return len(self.pages)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a row."""
        return self.pages.shape[1]

    @property
    def has_absent(self) -> bool:
        """Whether a head may lack columns."""
        return not self.is_even or any(self.num_missing)

    @cached_property
    def paged(self) -> Paged:
        """The memory for kernels that read through pages."""
        assert self.make_paged is not None
        return self.make_paged()

    @cached_property
    def on_device(self) -> torch.Tensor:
        """`behind`, `fresh` and `positions`, `[3, num_requests]` int32."""
        numbers = np.array([self.behind, self.fresh, self.positions], np.int32)
        return on_device(numbers, self.pages.device)

    def own(self, index: int) -> slice:
        """The columns that compete of a row's request."""
        return slice(self.num_missing[index // self.num_layers], self.num_competing)

    def row(self, index: int, num: int = 1) -> ScoringInputs:
        """What a scorer may read of a row, in its request's own columns.

        `num` layers of the request from that one on stand side by side.
        """
        request, layer = divmod(index, self.num_layers)
        missing, size = self.num_missing[request], self.block_size
        num_own, reader = self.num_competing - missing, self.layers[layer]
        layers, rows = slice(layer, layer + num), slice(index, index + num)
        pages = self.pages[rows, :, missing // size :].flatten(0, 1)
        if num == 1:
            key, value = reader.read(pages, num_own // size)
        else:
            memory = self.paged.memory
            read = memory.index_select(0, pages.flatten()).view(len(pages), -1, memory.shape[2])
            key, value = read.chunk(2, dim=-1)
        key, value = key[:, : num_own + self.behind[request]], value[:, :num_own]
        # All that is needed of queries is remembered.
        query = key.new_empty(0, *key.shape[::2])
        if self.query is not None:
            query = self.query[request, layers].transpose(0, 1).flatten(1, 2)
        inputs = reader.inputs(query, key, value)
        if num > 1:
            sinks = self.paged.sinks
            sinks = None if sinks is None else sinks[layers].flatten()
            inputs = replace(inputs, num_layers=num, sinks=sinks)
        if not self.is_even:
            inputs = replace(inputs, num_absent=self.num_absent[rows].flatten() - missing)
        numbers = self.numbers
        if numbers is not None:
            numbers = numbers[rows, :, missing : self.fresh[request]].flatten(0, 1)
        return replace(inputs, numbers=numbers, first_position=self.positions[request])

    def rows(self, most_bytes: int = 0) -> Iterator[tuple[slice, ScoringInputs]]:
        """All rows, one after the other, or layers of a request side by side, each with its place.

        Where kernels read through pages, `most_bytes` is what entries of several layers may take;
        fewer than those of one are for row by row.
        """
        step = 1
        if most_bytes and self.make_paged is not None and self.paged.codes is None:
            page = self.paged.memory[0]
            of_layer = self.pages[0].numel() * page.numel() * page.itemsize
            nothing = page.new_empty(0)
            scales = {layer.inputs(nothing, nothing, nothing).scale for layer in self.layers}
            step = max(1, most_bytes // of_layer) if len(scales) == 1 else 1
        for index in range(0, self.num_rows, self.num_layers):
            for row in range(index, index + self.num_layers, step):
                num = min(step, index + self.num_layers - row)
                yield slice(row, row + num), self.row(row, num)


@dataclass(frozen=True)
class _Given:
    """A layer whose tensors are at hand."""

    given: ScoringInputs

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        return replace(self.given, query=query, key=key, value=value)

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.given.key, self.given.value


def _paged(layers: Sequence[ScoringInputs]) -> Paged:
    """Copies keys and values into pages: each head of each layer has one."""
    first = layers[0]
    dtype = first.key.dtype
    num_kv_heads, num_tokens, head_size = first.key.shape
    shape = len(layers), num_kv_heads, num_tokens, 2 * head_size
    codes, stored = None, dtype
    if dtype.itemsize == 1:
        stored = torch.uint8
        numbers = torch.arange(256, dtype=torch.uint8, device=first.key.device)
        numbers = numbers.view(dtype).to(first.query.dtype)
        codes = numbers.expand(len(layers), 2, 256).contiguous()
    memory = torch.zeros(shape, dtype=stored, device=first.key.device)
    for pages, layer in zip(memory, layers, strict=True):
        pages[..., :head_size] = layer.key.view(stored) if codes is not None else layer.key
        value = layer.value[:, :num_tokens]
        part = pages[:, : value.shape[1], head_size:]
        part.copy_(value.contiguous().view(stored) if codes is not None else value)
    return Paged.of(layers, memory.flatten(0, 1), codes)


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as one, without a copy where they lie one after the other in one piece of memory."""
    first = parts[0]
    if len(parts) == 1:
        return first[None]
    if first.is_contiguous() and first.device.type != "meta":
        start, storage = first.storage_offset(), first.untyped_storage()._cdata
        side_by_side = all(
            part.is_contiguous()
            and part.shape == first.shape
            and part.untyped_storage()._cdata == storage
            and part.storage_offset() == start + index * first.numel()
            for index, part in enumerate(parts)
        )
        if side_by_side:
            return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([*parts])
