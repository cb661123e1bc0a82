"""The CUDA backend in a real engine: vLLM's scheduler and model runner, real weights, on the CPU.

Only FlashAttention's calls have stand-ins. The answers are those of the CPU backend.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine import flash_attention
from tests.engine.conftest import Answer, Engine, EngineFactory, preempting_all
from tests.engine.float64_prefill import Chosen, recording_blocks
from tests.engine.float64_rounds import recording_rounds
from tests.engine.random_hybrids import falcon_h1, gemma4, granite_h, saved
from tests.engine.random_models import random_gemma3, random_gpt_oss, random_prompts
from vllm_kvselect.engine import platforms
from vllm_kvselect.engine.cpu.worker import EvictionCPUWorker
from vllm_kvselect.engine.cuda.builder import CudaMetadataBuilder
from vllm_kvselect.engine.cuda.warm_up import warm_up
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.scoring.value_norms import OutputProjection

T = TypeVar("T")
PROMPT_LENS = (140, 150, 40, 130)
METHODS = (None, "layer-defensivekv", None, "knorm")
EVICTION = {"method": "adakv-perturb", "budget": 96, "allow_override": ["method"]}
# So few blocks that requests are preempted, and resume with chunks past their prompts' ends.
NUM_BLOCKS = 17
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "max_model_len": 320}


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


def on_both(
    start_engine: EngineFactory,
    patch: pytest.MonkeyPatch,
    ask: Callable[[Engine], T],
    eviction: dict[str, Any],
    num_blocks: int,
    **settings: Any,
) -> tuple[T, T]:
    """What engines with either backend are asked and answer, the CPU's last."""
    found = []
    for kind in ("FlashAttention", "CPU"):
        with start_engine(eviction, num_blocks, **{**SETTINGS, **settings}) as engine:
            builders = {type(builder).__name__ for builder in engine.worker._builders}
            assert builders == {f"Headwise{kind}MetadataBuilder"}
            found.append(ask(engine))
        patch.undo()
    return found[0], found[1]


def test_answers_are_those_of_the_cpu_backend(
    start_engine: EngineFactory, make_prompts: Any, on_flash_attention: pytest.MonkeyPatch
) -> None:
    extra_args = [method and {"kv_eviction": method} for method in METHODS]

    def ask(engine: Engine) -> list[Answer]:
        answers = engine.generate(make_prompts(PROMPT_LENS), 100, extra_args)
        assert engine.worker.kv_eviction_stats()["num_evicted"] > 3  # some of them twice
        return answers

    one, other = on_both(start_engine, on_flash_attention, ask, EVICTION, NUM_BLOCKS)
    assert one == other


def test_long_answers_are_those_of_the_cpu_backend(
    start_engine: EngineFactory, make_prompts: Any, on_flash_attention: pytest.MonkeyPatch
) -> None:
    methods = (None, "layer-keydiff", "r-kv", "keydiff")
    extra_args = [method and {"kv_eviction": method} for method in methods]
    eviction = {**EVICTION, "decode_budget": 96, "decode_interval": 64, "check_integrity": True}

    def ask(engine: Engine) -> tuple[list[Answer], dict[int, list[int]]]:
        with recording_rounds() as rounds, preempting_all(3, num_tokens=100) as preempted:
            answers = engine.generate(make_prompts(PROMPT_LENS), 170, extra_args)
        assert preempted
        return answers, {length: [*made] for length, made in rounds.items()}

    one, other = on_both(start_engine, on_flash_attention, ask, eviction, 40)
    assert one == other
    assert [len(one[1][length]) for length in PROMPT_LENS] == [2, 2, 1, 2]


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
    def ask(engine: Engine) -> list[Answer]:
        answers = engine.generate(random_prompts([200, 40, 170]), 60)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 2
        return answers

    given = {**EVICTION, "probe": None}, 60
    one, other = on_both(start_engine, on_flash_attention, ask, *given, model=make_model(tmp_path))
    assert one == other


@pytest.mark.parametrize("make_model", [granite_h, falcon_h1])
def test_hybrids_have_several_pages_in_a_block(
    make_model: Callable[[], PreTrainedModel],
    start_engine: EngineFactory,
    tmp_path: Path,
    on_flash_attention: pytest.MonkeyPatch,
) -> None:
    settings = {"model": saved(make_model, tmp_path), "max_model_len": 512}
    settings |= {"kv_cache_memory_bytes": 2**24, "enable_prefix_caching": False}
    methods = ("adakv", "knorm", "layer-keydiff", "none")
    eviction = {**EVICTION, "method": "adakv", "probe": None, "check_integrity": True}
    eviction |= {"decode_budget": 96, "decode_interval": 64}

    def ask(engine: Engine) -> list[Answer]:
        [builder] = engine.worker._builders
        assert builder.kv_cache_spec.block_size == 32
        assert engine.worker.vllm_config.cache_config.block_size == 96
        asked = [{"kv_eviction": method} for method in methods]
        answers = engine.generate(random_prompts([310, 290, 400, 60]), 90, asked)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 3
        return answers

    one, other = on_both(start_engine, on_flash_attention, ask, eviction, 0, **settings)
    assert one == other


def test_sparse_prefills_read_what_they_read_on_cpu(
    start_engine: EngineFactory, make_prompts: Any, on_flash_attention: pytest.MonkeyPatch
) -> None:
    sparse = {"prefill": "critiprefill", "prefill_segment": 32, "prefill_budget": 64}
    eviction = {**EVICTION, **sparse, "prefill_dense_until": 64}

    def ask(engine: Engine) -> tuple[list[Answer], Chosen]:
        with recording_blocks() as blocks:
            return engine.generate(make_prompts((190, 290, 60)), 20), blocks

    one, other = on_both(start_engine, on_flash_attention, ask, eviction, 60)
    assert one == other
    assert len(one[1]) == 2
