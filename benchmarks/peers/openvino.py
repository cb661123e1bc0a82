"""OpenVINO GenAI: its environment, the model in its format, and its own cache eviction."""

import hashlib
import tempfile
from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from peers.answers import (
    PeerConfig,
    Reply,
    answer_all,
    end_tokens,
    example_job,
    num_entries,
)
from peers.environment import Environment, make_environment, run_command
from peers.worker import Worker
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.predictions import Prediction, Setting
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import load_tokenizer, model_folder

WORKER = "openvino_worker.py"
ENVIRONMENT = Environment(
    name="openvino",
    packages=(
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        # What follows converts the model.
        "torch==2.13.0",
        "transformers==5.5.4",
        "nncf==3.4.0",
        "huggingface_hub==1.21.0",
        "requests==2.34.2",
    ),
    # It asks for torchvision, which a language model needs not and which must fit torch's build.
    bare=("optimum==2.3.0", "optimum-intel==2.2.0"),
)
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Data types by vLLM's name."""

BLOCK_SIZE = 32
"""Tokens per block on CPU: entries are dropped by block, for all heads of a layer."""
START = BLOCK_SIZE
RECENT = 2 * BLOCK_SIZE
LEAST = 3 * BLOCK_SIZE
"""Each of the three areas, start, evictable and recent, needs a block."""


def answer(
    config: PeerConfig, examples: Sequence[Example], done: Container[tuple[str, Setting]]
) -> Iterator[list[Prediction]]:
    """Answers every example in every setting, with a progress bar on stderr.

    Args:
        config: Model, methods and budgets.
        examples: The questions.
        done: Pairs of example and setting that are left out.

    Yields:
        One prediction at a time.

    Raises:
        EvaluationError: If its environment cannot be made, the model cannot be converted, its
            process fails, or a budget is too small.
    """
    for each in config.settings("regular"):
        for example in examples:
            _eviction(each, example)  # a budget that is too small shows now
    folder = make_environment(ENVIRONMENT)
    job = openvino_job(folder, model_folder(config.model), config.dtype or "float32")
    job["end_tokens"] = end_tokens(config.model, load_tokenizer(config.model))
    with Worker(folder, WORKER) as worker:

        def ask(setting: Setting, missing: list[Example]) -> Iterator[Reply]:
            lengths = {each.name: len(each.prompt) for each in missing}
            missing = sorted(missing, key=lambda each: len(each.prompt))
            # A pipeline has one budget, in tokens.
            for evicting, group in groupby(missing, lambda each: _eviction(setting, each)):
                asked = [example_job(each) for each in group]
                for reply in worker.ask(job | {"eviction": evicting, "examples": asked}):
                    yield reply | {"retained": share_retained(lengths[reply["example"]], evicting)}

        yield from answer_all(config, examples, done, ask)


def _eviction(setting: Setting, example: Example) -> dict[str, Any] | None:
    """OpenVINO's eviction of an example's prompt; None for the full cache."""
    if setting.budget is None:
        return None
    return eviction(setting.method, num_entries(setting.budget, len(example.prompt)))


def openvino_job(
    environment: Path,
    model: str,
    dtype: str,
    kv_precision: str = "",
    threads: int = 0,
    batched_tokens: int = 0,
) -> dict[str, Any]:
    """What every job of the worker says.

    Args:
        environment: Folder of the environment.
        model: Folder or hub name.
        dtype: Of activations, by vLLM's name; weights are stored in float32.
        kv_precision: Of the KV cache, by OpenVINO's name; empty for that of `dtype`.
        threads: 0 for as many as OpenVINO takes.
        batched_tokens: Tokens per step; 0 for OpenVINO's default, 256.

    Raises:
        EvaluationError: If the data type is unknown, or the model cannot be converted.
    """
    if dtype not in PRECISIONS:
        raise EvaluationError(f"--dtype {dtype} is none of {', '.join(PRECISIONS)}")
    return {
        "folder": str(convert(environment, model)),
        "precision": PRECISIONS[dtype],
        "kv_precision": kv_precision or PRECISIONS[dtype],
        "threads": threads,
        "batched_tokens": batched_tokens,
        "block_size": BLOCK_SIZE,
        "eviction": None,
        "sparse": False,
    }


def convert(environment: Path, model: str) -> Path:
    """Returns the model in OpenVINO's format with float32 weights, converted on first use.

    Args:
        environment: Folder of the environment.
        model: Folder or hub name.

    Raises:
        EvaluationError: If it cannot be converted; the message holds the end of the log.
    """
    place = str(Path(model).resolve()) if Path(model).exists() else model
    digest = hashlib.sha256(place.encode()).hexdigest()[:8]
    folder = environment / "models" / f"{Path(model).name}-{digest}"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return folder
        with (
            Console(stderr=True).status(f"converting {model}, once"),
            tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
        ):
            made = Path(scratch, "model")
            export = (environment / "bin" / "optimum-cli", "export", "openvino", "--model", model)
            task = ("--task", "text-generation-with-past", "--weight-format", "fp32")
            run_command(*export, *task, made)
            made.rename(folder)
    return folder


def eviction(method: str, num_entries: int) -> dict[str, Any]:
    """Its eviction at a budget.

    The budget is `max_cache_size`, rounded down to whole blocks. What is filled of the last block
    stays too: 0 to 31 tokens. Unlike ours it holds for generated tokens as well.

    Args:
        method: One of `OPENVINO_METHODS`.
        num_entries: Entries per KV head.

    Returns:
        What a worker is told.

    Raises:
        EvaluationError: If the budget is too small.
    """
    if num_entries < LEAST:
        raise EvaluationError(
            f"OpenVINO's eviction retains {LEAST} entries at least, and the budget is "
            f"{num_entries}: take a larger one, or longer prompts"
        )
    size = num_entries // BLOCK_SIZE * BLOCK_SIZE
    recent = min(RECENT, size - START - BLOCK_SIZE)
    evictable = (size - START - recent) // BLOCK_SIZE
    # KVCrush retains blocks beyond `max_cache_size`.
    crushed = evictable // 4 if method == "openvino-kvcrush" else 0
    return {
        "start_size": START,
        "recent_size": recent,
        "max_cache_size": size - crushed * BLOCK_SIZE,
        "aggregation": "SUM" if method == "openvino-sum" else "NORM_SUM",
        "kvcrush_blocks": crushed,
    }


def share_retained(num_tokens: int, options: dict[str, Any] | None) -> float:
    """Share of a prompt's entries that is retained after its prefill."""
    if options is None:
        return 1.0
    size = options["max_cache_size"] + options["kvcrush_blocks"] * BLOCK_SIZE
    if num_tokens < options["max_cache_size"] + BLOCK_SIZE:
        return 1.0
    return float((size + num_tokens % BLOCK_SIZE) / num_tokens)
