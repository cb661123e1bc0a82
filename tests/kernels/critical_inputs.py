"""Checks of what stands for segments and blocks, for the twins on any device."""

import torch

from tests.strategies import Shape, random_layer
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.prefilling.criticality import Extremes

EPS = torch.finfo(torch.float32).eps


def check_extremes(
    kernels: Kernels, shape: Shape, seed: int, dtype: torch.dtype, size: int, device: str = "cpu"
) -> None:
    """Compares the extremes of keys that are every other channel block of wider rows."""
    layer = random_layer(shape, seed, dtype)
    wide = layer.key.transpose(0, 1).repeat(1, 2, 1)[: len(layer.key[0]) // size * size]
    key = wide[:, : shape.num_kv_heads].transpose(0, 1).to(device)
    found, expected = (k.extremes(key, size) for k in (kernels, REFERENCES))
    assert torch.equal(found.largest, expected.largest)
    assert torch.equal(found.smallest, expected.smallest)


def check_criticality(
    kernels: Kernels,
    shape: Shape,
    seed: int,
    dtype: torch.dtype,
    num_segments: int,
    device: str = "cpu",
) -> None:
    """Compares what is said of some of the blocks that there is memory for."""
    layer = random_layer(shape, seed, dtype)
    num_blocks = layer.key.shape[1] // 2
    kept = torch.stack((layer.key, layer.key - 1)).to(device)[:, :, :num_blocks]
    keys = Extremes(kept[0], kept[1])
    query = layer.query[:1].transpose(0, 1) * torch.arange(1, num_segments + 1)[:, None]
    queries = Extremes(query.to(device, dtype), (query - 0.5).to(device, dtype))
    before = torch.randint(1, num_blocks + 1, (num_segments,), generator=torch.manual_seed(seed))
    given = (queries, keys, shape.scale, before.to(device))
    found, expected = (k.criticality(*given).cpu() for k in (kernels, REFERENCES))
    assert found.dtype == torch.float32
    # Sums of products in another order.
    largest = float(queries.largest.float().abs().max() * keys.smallest.float().abs().max())
    error = 2 * shape.head_size**2 * EPS * largest * shape.scale
    assert torch.allclose(found, expected, rtol=error, atol=error)
    assert not found[torch.arange(num_blocks).expand_as(found) >= before[:, None, None]].any()
