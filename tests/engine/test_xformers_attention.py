"""xformers' kernel, in Triton's interpreter, as provider of the decode call."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig

from tests.engine import flash_attention
from tests.engine.configurations import set_to
from tests.engine.cuda_layers import WIDE, Layers, vllm_config
from tests.engine.flash_attention import attention
from tests.engine.test_cuda_backend import eviction, mixed_steps
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.cuda import xformers_attention
from vllm_kvselect.engine.cuda.xformers_attention import SplitKAttention
from vllm_kvselect.engine.frontend import checks
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.paging.page_table import PageTable

pytest.importorskip("xformers")
# The interpreter multiplies bfloat16 by its bits.
DTYPE = torch.float16
ROUNDING = torch.finfo(DTYPE).eps
"""Weights are rounded before they are multiplied with values, and the result is."""


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # Parts without a key divide zero by zero, and weigh nothing.
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (3, 32), (8, 16), (4, 128)])
def test_every_sequence_attends_to_its_own_pages(
    block_size: int, group: int, head_size: int
) -> None:
    random = torch.Generator().manual_seed(block_size + group)
    num_pages, lengths = 40, [1, block_size, 2 * block_size + 5, 300, 17]
    memory = torch.randn(num_pages, block_size, 1, 2 * head_size, generator=random).to(DTYPE)
    key, value = memory.split(head_size, dim=-1)
    query = torch.randn(len(lengths), group, head_size, generator=random).to(DTYPE)
    width = 2 + -(-max(lengths) // block_size)
    pages = torch.randint(num_pages, (len(lengths), width), generator=random).int()
    table = PageTable(pages, torch.tensor(lengths, dtype=torch.int32))
    output, scale = torch.full_like(query, torch.nan), head_size**-0.5
    SplitKAttention(key, value, scale)(query, table, max(lengths), output)
    for sequence, length in enumerate(lengths):
        read = (
            part[pages[sequence].long()].flatten(0, 1)[:length].double() for part in (key, value)
        )
        expected = attention(query[sequence, None].double(), *read, scale)[0]
        largest = float(value.abs().max())
        torch.testing.assert_close(
            output[sequence].double(), expected, rtol=ROUNDING, atol=largest * ROUNDING
        )


def test_steps_in_which_every_row_has_one_query_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_attention.install(monkeypatch)
    monkeypatch.setattr(flash_attention, "DTYPES", {DTYPE})
    layers = Layers(eviction(decode_attention="xformers"), WIDE, vllm_config(dtype="float16"))
    layers.atol = 4 * ROUNDING  # of values up to 4
    calls = []
    for layer in layers.layers:
        split_k = layer.impl._split_k

        def noted(*args: Any, call: Any = split_k) -> None:
            calls.append(len(args[1].seq_lens))
            call(*args)

        layer.impl._split_k = noted
    mixed_steps(layers)
    assert len(calls) > len(layers.layers)


def test_layers_with_sinks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_attention.install(monkeypatch)
    config = vllm_config(dtype="float16")
    with pytest.raises(ConfigError, match="attention sinks; leave decode_attention out"):
        Layers(eviction(decode_attention="xformers"), REFERENCES, config, with_sinks=True)


def test_it_is_refused_where_it_is_not_installed_or_triton_is_too_new(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases: dict[str, tuple[int, ...] | None] = {"xformers": None, "triton": (3, 9)}
    monkeypatch.setattr(xformers_attention, "_release", releases.get)
    missing, too_new = xformers_attention.problems(config)
    assert "pip install '.[xformers]' in a checkout" in missing
    assert "pip install 'triton<3.9'" in too_new


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return vllm_config()


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("cache_config.cache_dtype", "fp8", "its own fp8 format: leave --kv-cache-dtype out, or"),
        ("model_config.dtype", torch.float32, "--dtype bfloat16"),
        ("compilation_config.cudagraph_mode", CUDAGraphMode.FULL, "add -cc.cudagraph_mode=PIECE"),
    ],
)
def test_what_it_cannot_take_is_refused(path: str, value: Any, reason: str) -> None:
    config = vllm_config()
    assert xformers_attention.problems(config) == []
    set_to(config, path, value)
    (found,) = xformers_attention.problems(config)
    assert reason in found


def test_it_needs_cuda(config: VllmConfig) -> None:
    with pytest.raises(ConfigError, match="decode_attention = 'xformers' needs CUDA; leave it out"):
        checks.refuse_unsupported(config, eviction(decode_attention="xformers"))
