"""Requests of different lengths whose entries lie in pages of one memory, in no order."""

from dataclasses import dataclass, replace

import torch

from tests.strategies import rotation
from vllm_kvselect.scoring.held import Held, Paged
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.probe import num_features
from vllm_kvselect.scoring.value_norms import OutputProjection


@dataclass(frozen=True)
class World:
    """Sizes of some requests.

    Attributes:
        lengths: Of each request, pages that compete.
        behind: Of each request, entries behind these.
        num_layers: Layers.
        num_kv_heads: KV heads.
        group: Query heads of a KV head.
        head_size: Channels.
        block_size: Entries per page.
        window: Queries of a request.
        absent: Whether heads lack some of their first pages.
        alike: Whether all layers scale attention alike, so that they may stand side by side.
        dtype: Of keys and values as they are scored.
        cache_dtype: Of the memory, if it is quantised.
        seed: Of all that is drawn.
    """

    lengths: tuple[int, ...] = (3, 7, 5)
    behind: tuple[int, ...] = (5, 3, 6)
    num_layers: int = 2
    num_kv_heads: int = 3
    group: int = 2
    head_size: int = 16
    block_size: int = 8
    window: int = 3
    absent: bool = False
    alike: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    seed: int = 0
    device: str = "cpu"

    def layers(self, wide: bool = False) -> list["WorldLayer"]:
        """The layers; wide ones read the same entries as float64."""
        draw = torch.Generator().manual_seed(self.seed)
        shape = self.num_kv_heads, self.head_size, self.group, 24
        found = []
        turn = rotation(self.head_size)
        turn = replace(turn, cos=turn.cos.to(self.device), sin=turn.sin.to(self.device))
        for index in range(self.num_layers):
            weight = torch.randn(shape, generator=draw).to(self.dtype)
            probe = torch.randn(num_features(self.head_size), self.num_kv_heads, generator=draw)
            sinks = torch.randn(self.num_kv_heads * self.group, generator=draw)
            if wide:
                weight, sinks = weight.double(), sinks.double()
            empty = torch.empty(0, self.num_kv_heads * self.group, self.head_size)
            facts = ScoringInputs(
                empty,
                empty,
                empty,
                # Mostly another scale for each layer, and one of them does not rotate.
                0.2 + 0.1 * index * (not self.alike),
                OutputProjection.of(weight.to(self.device)),
                sinks.to(self.device),
                index,
                None if index == 1 else turn,
                probe=(0.3 * probe).to(self.device),
            )
            found.append(WorldLayer(self, facts, self.memory, wide))
        return found

    @property
    def num_pages(self) -> int:
        """Pages of a head of a layer, all requests together, and one that nobody has."""
        return len(self.lengths) * (max(self.lengths) + 2) + 1

    @property
    def memory(self) -> torch.Tensor:
        """`[num_pages, block_size, 2 * head_size]`; one page that nobody has is no number."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        total = self.num_layers * self.num_kv_heads * self.num_pages
        memory = torch.randn(total, self.block_size, 2 * self.head_size, generator=draw)
        memory[0] = torch.nan
        return memory.to(self.cache_dtype or self.dtype).to(self.device)

    def codes(self) -> torch.Tensor | None:
        """What the bytes of the memory stand for: each layer has other scales."""
        if self.cache_dtype is None:
            return None
        numbers = torch.arange(256, dtype=torch.uint8).view(self.cache_dtype).to(self.dtype)
        scales = 0.5 + 0.25 * torch.arange(2 * self.num_layers).view(-1, 2, 1)
        return (numbers * scales.to(self.dtype)).to(self.device)

    def held(self, wide: bool = False, numbers: bool = False) -> Held:
        """What the requests hold; with numbers, of some of their first entries."""
        draw = torch.Generator().manual_seed(self.seed + 2)
        num_requests, most = len(self.lengths), max(self.lengths)
        shape = num_requests, self.num_layers, self.num_kv_heads
        width = most + 2
        ids = 1 + torch.randperm(
            self.num_layers * self.num_kv_heads * self.num_pages - 1, generator=draw
        )
        pages = ids[: shape[0] * shape[1] * shape[2] * width].view(*shape, width).clone()
        missing = torch.tensor([most - length for length in self.lengths])
        absent = missing[:, None, None].expand(shape).clone()
        if self.absent:
            for request, length in enumerate(self.lengths):
                absent[request] += torch.randint(length, shape[1:], generator=draw)
                absent[request, 0, 0] = missing[request]
        columns = torch.arange(width)
        pages[columns < absent[..., None]] = 0
        query = torch.randn(
            num_requests,
            self.num_layers,
            self.window,
            self.num_kv_heads * self.group,
            self.head_size,
            generator=draw,
        ).to(self.dtype)
        num_competing = most * self.block_size
        known, fresh, positions = (
            None,
            [int(n) * self.block_size for n in missing],
            [0] * num_requests,
        )
        if numbers:
            known = torch.rand(
                num_requests * self.num_layers, self.num_kv_heads, num_competing, generator=draw
            ).to(self.device)
            fresh = [begin + self.block_size for begin in fresh]
            positions = [3 + request for request in range(num_requests)]
            if wide:
                known = known.double()
        layers = self.layers(wide)
        memory = self.memory if self.cache_dtype is None else self.memory.view(torch.uint8)
        return Held(
            layers,
            pages.flatten(0, 1).to(self.device),
            (absent * self.block_size).flatten(0, 1).to(self.device),
            num_competing,
            self.block_size,
            [int(n) * self.block_size for n in missing],
            self.behind,
            not self.absent,
            (query.double() if wide else query).to(self.device),
            known,
            fresh,
            positions,
            lambda: Paged.of([layer.facts for layer in layers], memory, self.codes()),
        )


@dataclass(frozen=True)
class WorldLayer:
    """Reads the pages of a layer."""

    world: World
    facts: ScoringInputs
    memory: torch.Tensor
    wide: bool

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        return replace(self.facts, query=query, key=key, value=value)

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = self.world.codes()
        read = self.memory[pages].flatten(1, 2)
        key, value = read.split(self.world.head_size, dim=-1)
        if codes is not None:
            of_keys, of_values = codes[self.facts.layer_index]
            key = of_keys[key.contiguous().view(torch.uint8).long()]
            value = of_values[value.contiguous().view(torch.uint8).long()]
        if self.wide:
            key, value = key.double(), value.double()
        return key, value[:, : num_competing * self.world.block_size]
