"""fp8 caches in real engines: each gives what a float32 cache of the same, rounded entries gives.

vLLM's kernel computes the same from a byte as from the number that it stands for, bit for bit where
scales and the root of the head size are powers of two. So an engine that rounds entries before it
writes them says what tokens are right; other tests compare such an engine with a float64 model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import attention

from tests.engine.all_methods import check_nothing_dropped_is_stock, serve_all_methods
from tests.engine.conftest import EngineFactory, engines_of, needs_fp8_caches
from tests.engine.random_models import random_gpt_oss
from tests.load.mixture import BLOCK_SIZE, MAX_MODEL_LEN, SERVER, Answer, Request, difference, serve
from tests.load.mixture.requests import SETTINGS
from vllm_kvselect.engine.cpu.backend import HeadwiseCPUAttentionImpl
from vllm_kvselect.engine.cpu.pages import PageCodec, write_entries

pytestmark = needs_fp8_caches
MORE_METHODS = ("random", "keydiff", "layer-probe", "ada-probe", "ada-pyramidkv")
SETTINGS_OF_ALL = (*SETTINGS, *({"kv_eviction": method} for method in MORE_METHODS))
CROWDED = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 150, "max_num_seqs": 8}
NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 8


def rounded(entries: torch.Tensor, scale: float, cache_dtype: str) -> torch.Tensor:
    """What an fp8 cache makes of keys, or of values, `[n, num_kv_heads, head_size]` float32."""
    size = entries.shape[-1]
    rows = entries.reshape(-1, size) / scale
    num_pages = -(-len(rows) // BLOCK_SIZE)
    pages = torch.zeros(num_pages, 1, BLOCK_SIZE, 2 * size, dtype=torch.uint8)
    write_entries(pages, rows, rows, torch.arange(len(rows)), "vec", cache_dtype)
    codec = PageCodec("vec", torch.float32, BLOCK_SIZE, size, cache_dtype=cache_dtype)
    read = codec.read(pages, torch.arange(num_pages)[None], codec.numbers(scale), True)
    return read[0, : len(rows)].view(entries.shape)


@contextmanager
def rounding(cache_dtype: str, scales: tuple[float, float]) -> Iterator[None]:
    """Lets layers round keys and values before they do anything with them."""
    update = HeadwiseCPUAttentionImpl.do_kv_cache_update
    forward = HeadwiseCPUAttentionImpl.forward

    def of_rounded(entries: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = zip(entries, scales, strict=True)
        return [rounded(part, scale, cache_dtype) for part, scale in given]

    def update_rounded(self: Any, layer: Any, key: Any, value: Any, *args: Any) -> None:
        update(self, layer, *of_rounded((key, value)), *args)

    def forward_rounded(
        self: Any, layer: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any
    ) -> Any:
        return forward(self, layer, query, *of_rounded((key, value)), *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadwiseCPUAttentionImpl, "do_kv_cache_update", update_rounded)
        patch.setattr(HeadwiseCPUAttentionImpl, "forward", forward_rounded)
        yield


@contextmanager
def scaled(key_scale: float, value_scale: float) -> Iterator[None]:
    """Gives layers the scales that a checkpoint would bring."""
    default = attention.set_default_quant_scales

    def set_scales(layer: Any, *args: Any, **options: Any) -> None:
        default(layer, *args, **options)
        layer._k_scale_float, layer._v_scale_float = key_scale, value_scale

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "set_default_quant_scales", set_scales)
        yield


def requests(text: list[int]) -> list[Request]:
    """Every way to drop entries, and most methods; contexts are shared by some."""
    made = []
    for index, settings in enumerate(SETTINGS_OF_ALL):
        start = 0 if "kv_eviction_context" in settings else 500 * index
        sampling = {"temperature": 0.0, "logprobs": 1, "ignore_eos": True, "extra_args": settings}
        sampling["max_tokens"] = 90 if "kv_eviction_decode_budget" in settings else 12
        made.append(Request("greedy", tuple(text[start : start + 330]), sampling))
    return made


def served(start: EngineFactory, asked: list[Request], **settings: Any) -> list[Answer]:
    with start(SERVER, NUM_BLOCKS, disable_log_stats=False, **CROWDED, **settings) as engine:
        service = serve(engine.llm, asked, 12, seed=1, preempt=0.02)
        assert service.seen["preemptions"] > 0
        assert service.seen["cached tokens"] > 0
        assert engine.worker.kv_eviction_stats()["num_evicted"] > 20
        assert engine.blocks_in_use() == 0
    return service.answers


def test_every_kind_of_request_is_answered_as_from_rounded_entries(
    start_engine: EngineFactory, text_tokens: list[int]
) -> None:
    asked, scales = requests(text_tokens), (0.25, 0.0625)
    with rounding("fp8", scales):
        expected = served(start_engine, asked)
    with scaled(*scales):
        answers = served(start_engine, asked, kv_cache_dtype="fp8")
    for request, *pair in zip(asked, expected, answers, strict=True):
        assert difference(request, *pair) is None, request.sampling


def test_sinks_and_sliding_windows(tmp_path: Path) -> None:
    with engines_of(random_gpt_oss(tmp_path / "gpt-oss", head_dim=64)) as start:
        check_nothing_dropped_is_stock(start, kv_cache_dtype="fp8_e5m2")
        with rounding("fp8_e5m2", (1, 1)):
            expected = serve_all_methods(start)
        served = serve_all_methods(start, kv_cache_dtype="fp8_e5m2")
    assert served.answers == expected.answers
    assert served.recorder.retained == expected.recorder.retained
