"""Serves requests by model runner V2 in real engines on the CPU, over stand-ins for FlashAttention.

Run as a module in a process of its own: vLLM decides when it is imported whether there is Triton,
and here that runner's kernels run in Triton's interpreter. Arguments are names of runs. Prints, as
JSON, what each found, or what was raised.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # as triton-cpu

from vllm.config import VllmConfig  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

from tests.engine import flash_attention, test_runner_v2  # noqa: E402
from tests.engine.conftest import Engine, _engine, preempting_all  # noqa: E402
from tests.engine.quick_starts import look_at_models_here  # noqa: E402
from tests.engine.random_models import random_eagle, random_llama, random_mimo  # noqa: E402
from tests.engine.test_cuda_end_to_end import FlashAttentionOnCPU  # noqa: E402
from tests.engine.test_drafters import (  # noqa: E402
    MIXED_SERVER,
    NUM_LAYERS,
    PROMPTS,
    SERVER,
    SETTINGS,
    counted,
    drafting,
)
from tests.kernels import interpreter  # noqa: E402
from tests.load.mixture import MAX_MODEL_LEN, serve  # noqa: E402
from vllm_kvselect.engine import platforms  # noqa: E402
from vllm_kvselect.engine.frontend import checks  # noqa: E402

NUM_GENERATED = test_runner_v2.NUM_GENERATED


@contextmanager
def model_runner_v2(is_async: bool) -> Iterator[None]:
    """Engines have that runner, and our CUDA backend over stand-ins."""
    cpu = platforms.PLATFORMS["cpu"]
    worker = f"{FlashAttentionOnCPU.__module__}.{FlashAttentionOnCPU.__name__}"
    finish = CpuPlatform.check_and_update_config.__func__

    def finish_scheduling(cls: type, config: VllmConfig) -> None:
        finish(cls, config)
        config.scheduler_config.async_scheduling = is_async

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(finish_scheduling))
        patch.setattr(checks, "_cpu_problems", lambda _: [])
        patch.setitem(platforms.PLATFORMS, "cpu", replace(cpu, worker=worker))
        flash_attention.install(patch)
        patch.setattr(flash_attention, "DTYPES", {torch.float32})
        yield


@contextmanager
def dummy_batches(worker: Any) -> Iterator[list[int]]:
    """Before each step made-up rows are computed, as where ranks share experts.

    Yields how many requests there were then.
    """
    execute, num_requests = worker.execute_model, []

    def execute_after_dummy(scheduled: Any) -> Any:
        worker.execute_dummy_batch()
        num_requests.append(len(worker._requests))
        return execute(scheduled)

    worker.execute_model = execute_after_dummy
    try:
        yield num_requests
    finally:
        del worker.execute_model


@contextmanager
def drafting_engine(
    folder: Path, method: str, server: dict[str, Any], is_async: bool, **settings: Any
) -> Iterator[Engine]:
    """An engine with that runner and a drafter, of the model that this drafter is of."""
    allowed = [name for name in server["allow_override"] if "decode" not in name or not is_async]
    server = {**server, "allow_override": allowed}
    model = folder / ("mtp" if method == "mtp" else "draft_model")
    settings = drafting(folder, method) | settings
    with model_runner_v2(is_async), _engine(server, 0, model=model, **settings) as engine:
        runner = engine.worker.model_runner
        assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner"  # V2
        assert engine.scheduler.scheduler_config.async_scheduling is is_async
        assert type(engine.impls[-1]).__name__ == "HeadwiseFlashAttentionImpl"
        yield engine
        assert engine.blocks_in_use() == 0


def counts(engine: Engine) -> dict[str, Any]:
    """How often it drafted, and how many prompts it cut."""
    return {
        "num_drafts": counted(engine, "vllm:spec_decode_num_drafts"),
        "num_cut": engine.worker.kv_eviction_stats()["num_evicted"],
    }


def drafts(folder: Path, run: str) -> dict[str, Any]:
    """Answers with a drafter, of requests that are preempted on the way."""
    method, chosen = "eagle" if run == "rounds" else run, test_runner_v2.CHOSEN[run]
    with drafting_engine(folder, method, SERVER, is_async=run != "rounds") as engine:
        with (
            preempting_all(1, NUM_GENERATED // 2) as preempted,
            dummy_batches(engine.worker) as num_requests,
        ):
            answers = engine.generate(
                [PROMPTS[index] for index in chosen],
                NUM_GENERATED,
                [SETTINGS[index] for index in chosen],
            )
        assert preempted
        assert max(num_requests) > 1
        return {"answers": [asdict(answer) for answer in answers], **counts(engine)}


def mixed(folder: Path, method: str) -> dict[str, Any]:
    """What clients with mixed requests receive, who come and go while a drafter runs."""
    limit = {"max_model_len": MAX_MODEL_LEN}
    with drafting_engine(folder, method, MIXED_SERVER, is_async=True, **limit) as engine:
        requests = test_runner_v2.mixed_requests_without_rounds()
        service = serve(engine.llm, requests, 16, seed=4, preempt=0.02, stream=True)
        tokens = [answer.token_ids.get(0, []) for answer in service.answers]
        return {"tokens": tokens, "seen": service.seen, **counts(engine)}


def hybrid(folder: Path) -> dict[str, Any]:
    """Answers of a model that keeps states beside attention."""
    settings = test_runner_v2.settings_of_hybrid(folder / "hybrid")
    with model_runner_v2(True), _engine(test_runner_v2.HYBRID, 0, **settings) as engine:
        answers = engine.generate(
            test_runner_v2.PROMPTS_OF_HYBRID, NUM_GENERATED, test_runner_v2.METHODS_OF_HYBRID
        )
        return {
            "answers": [asdict(answer) for answer in answers],
            "num_cut": engine.worker.kv_eviction_stats()["num_evicted"],
        }


def serve_run(folder: Path, run: str) -> dict[str, Any]:
    """What a run finds, by its name."""
    if run == "hybrid":
        return hybrid(folder)
    if run.startswith("mixed "):
        return mixed(folder, run.removeprefix("mixed "))
    return drafts(folder, run)


def main(chosen: Sequence[str]) -> None:
    interpreter.quicken()
    look_at_models_here()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_llama(folder / "draft_model", NUM_LAYERS)
        random_eagle(folder / "eagle")
        random_eagle(folder / "eagle3", num_hidden_states=3)
        random_mimo(folder / "mtp", NUM_LAYERS)
        for run in chosen:
            try:
                found[run] = serve_run(folder, run)
            except Exception:
                found[run] = traceback.format_exc()[-3000:]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
