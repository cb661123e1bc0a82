"""The CUDA backend in a real engine: vLLM's scheduler and model runner, real weights, on the CPU.

Only FlashAttention's calls have stand-ins. The answers are those of the CPU backend.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine import flash_attention
from tests.engine.conftest import EngineFactory, preempting_all
from tests.engine.float64_prefill import recording_blocks
from tests.engine.float64_rounds import recording_rounds
from tests.engine.random_hybrids import falcon_h1, gemma4, granite_h, saved
from tests.engine.random_models import random_gemma3, random_gpt_oss, random_prompts
from vllm_kvselect.engine import platforms
from vllm_kvselect.engine.cpu.worker import EvictionCPUWorker
from vllm_kvselect.engine.cuda.builder import CudaMetadataBuilder
from vllm_kvselect.engine.cuda.warm_up import warm_up
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.scoring.value_norms import OutputProjection

PROMPT_LENS = (140, 150, 40, 130)
METHODS = (None, "layer-defensivekv", None, "knorm")
EVICTION = {"method": "adakv-perturb", "budget": 96, "allow_override": ["method"]}
# So few blocks that requests are preempted, and resume with chunks past their prompts' ends.
NUM_BLOCKS = 17
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 100,
    "max_num_seqs": 4,
    "max_model_len": 320,
}


class FlashAttentionOnCPU(EvictionCPUWorker):
    """vLLM's CPU worker with the backend, and the warm-up, of the CUDA worker."""

    backend = "vllm_kvselect.engine.cuda.flash_attention.HeadwiseFlashAttentionBackend"

    def _load_kernels(self) -> Kernels:
        return REFERENCES

    def _prepared(self, projection: OutputProjection) -> OutputProjection:
        return projection

    def compile_or_warm_up_model(self) -> Any:
        for builder in self._builders:
            assert isinstance(builder, CudaMetadataBuilder)
            warm_up(builder, [self._eviction.method], self._eviction)
        return super().compile_or_warm_up_model()


@pytest.fixture
def on_flash_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        flash_attention.install(patch)
        patch.setattr(flash_attention, "DTYPES", {torch.float32})
        worker = f"{__name__}.{FlashAttentionOnCPU.__name__}"
        patch.setitem(
            platforms.PLATFORMS, "cpu", replace(platforms.PLATFORMS["cpu"], worker=worker)
        )
        yield patch


def test_answers_are_those_of_the_cpu_backend(
    start_engine: EngineFactory, make_prompts: Any, on_flash_attention: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(PROMPT_LENS)
    extra_args = [method and {"kv_eviction": method} for method in METHODS]
    with start_engine(EVICTION, NUM_BLOCKS, **SETTINGS) as engine:
        on_device = engine.generate(prompts, 100, extra_args)
        assert engine.worker.kv_eviction_stats()["num_evicted"] > 3  # some of them twice
        assert type(engine.impls[0]).__name__ == "HeadwiseFlashAttentionImpl"
    on_flash_attention.undo()
    with start_engine(EVICTION, NUM_BLOCKS, **SETTINGS) as engine:
        assert type(engine.impls[0]).__name__ == "HeadwiseCPUAttentionImpl"
        assert engine.generate(prompts, 100, extra_args) == on_device


def test_long_answers_are_those_of_the_cpu_backend(
    start_engine: EngineFactory, make_prompts: Any, on_flash_attention: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(PROMPT_LENS)
    methods = (None, "layer-keydiff", "r-kv", "keydiff")
    extra_args = [method and {"kv_eviction": method} for method in methods]
    eviction = {**EVICTION, "decode_budget": 96, "decode_interval": 64, "check_integrity": True}
    answers, num_rounds = [], []
    for _ in ("FlashAttention", "CPU"):
        with (
            start_engine(eviction, 40, **SETTINGS) as engine,
            recording_rounds() as rounds,
            preempting_all(3, num_tokens=100) as preempted,
        ):
            answers.append(engine.generate(prompts, 170, extra_args))
        assert preempted
        num_rounds.append({length: [*made] for length, made in rounds.items()})
        on_flash_attention.undo()
    assert answers[0] == answers[1]
    assert num_rounds[0] == num_rounds[1]
    assert [len(num_rounds[0][length]) for length in PROMPT_LENS] == [2, 2, 1, 2]


def random_gemma4(folder: Path) -> Path:
    """With layers that read other layers' caches."""
    return saved(partial(gemma4, 3), folder)


@pytest.mark.parametrize("make_model", [random_gemma3, random_gpt_oss, random_gemma4])
def test_sliding_windows_beside_full_attention_stay_vllms_and_sinks_count(
    make_model: Callable[[Path], Path],
    start_engine: EngineFactory,
    tmp_path: Path,
    on_flash_attention: pytest.MonkeyPatch,
) -> None:
    settings = {**SETTINGS, "model": make_model(tmp_path), "skip_tokenizer_init": True}
    prompts, num_freed = random_prompts([200, 40, 170]), []
    answers = []
    for _ in ("FlashAttention", "CPU"):
        with start_engine({**EVICTION, "probe": None}, 60, **settings) as engine:
            answers.append(engine.generate(prompts, 60))
            num_freed.append(engine.worker.kv_eviction_stats()["num_evicted"])
        on_flash_attention.undo()
    assert answers[0] == answers[1]
    assert num_freed == [2, 2]


@pytest.mark.parametrize("make_model", [granite_h, falcon_h1])
def test_hybrids_have_several_pages_in_a_block(
    make_model: Callable[[], PreTrainedModel],
    start_engine: EngineFactory,
    tmp_path: Path,
    on_flash_attention: pytest.MonkeyPatch,
) -> None:
    settings = {**SETTINGS, "model": saved(make_model, tmp_path), "skip_tokenizer_init": True}
    settings |= {"kv_cache_memory_bytes": 2**24, "enable_prefix_caching": False}
    settings["max_model_len"] = 512
    methods = ("adakv", "knorm", "layer-keydiff", "none")
    extra_args = [{"kv_eviction": method} for method in methods]
    eviction = {**EVICTION, "method": "adakv", "probe": None, "check_integrity": True}
    eviction |= {"decode_budget": 96, "decode_interval": 64}
    prompts, answers = random_prompts([310, 290, 400, 60]), []
    for kind in ("HeadwiseFlashAttention", "HeadwiseCPU"):
        with start_engine(eviction, 0, **settings) as engine:
            [builder] = engine.worker._builders
            assert type(builder).__name__ == f"{kind}MetadataBuilder"
            assert builder.kv_cache_spec.block_size == 32
            assert engine.worker.vllm_config.cache_config.block_size == 96
            answers.append(engine.generate(prompts, 90, extra_args))
            assert engine.worker.kv_eviction_stats()["num_evicted"] == 3
        on_flash_attention.undo()
    assert answers[0] == answers[1]


def test_sparse_prefills_read_what_they_read_on_cpu(
    start_engine: EngineFactory, make_prompts: Any, on_flash_attention: pytest.MonkeyPatch
) -> None:
    prompts, made = make_prompts((190, 290, 60)), []
    sparse = {
        "prefill": "critiprefill",
        "prefill_segment": 32,
        "prefill_budget": 64,
        "prefill_dense_until": 64,
    }
    for _ in ("FlashAttention", "CPU"):
        with (
            start_engine({**EVICTION, **sparse}, 60, **SETTINGS) as engine,
            recording_blocks() as blocks,
        ):
            made.append((engine.generate(prompts, 20), blocks))
        on_flash_attention.undo()
    (answers, blocks), (others, other_blocks) = made
    assert answers == others
    assert blocks == other_blocks
    assert len(blocks) == 2
