"""RULER's generators: run as processes, their prompts kept in the user's cache."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from vllm_kvselect.cache_dir import default_cache_dir
from vllm_kvselect.evaluation.suites import ruler_runner
from vllm_kvselect.evaluation.suites.ruler_package import PACKAGE, Task
from vllm_kvselect.offline.errors import EvaluationError

PUBLISHED_SEED = 42
"""What RULER itself uses, whatever `--random_seed` says; our seed 0."""
_NEEDED = ("nltk", "scipy", "tenacity", "tqdm", "wonderwords")


class Prompt(NamedTuple):
    """A prompt up to where the answer begins, and right answers, or parts of one."""

    text: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Generator:
    """Makes prompts of all tasks for one tokenizer, so many per task and length.

    The seed decides texts; 0 gives those that RULER publishes.
    """

    tokenizer: Path
    num_prompts: int
    seed: int

    def prompts(self, task: Task, length: int, max_tokens: int, spare: int = 0) -> list[Prompt]:
        """Returns prompts, making them on first use.

        Of the length, prompt and answer together, `spare` tokens stay unused.

        Raises:
            EvaluationError: If the generator cannot make such prompts.
        """
        _check_packages()
        arguments = self._arguments(task, length, max_tokens, spare)
        file = self._cached(task, length, arguments)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".making-", dir=file.parent) as scratch:
                self._run(task, length, [*arguments, "--save_dir", scratch])
                # Appears complete or not at all; of two processes the last one wins.
                Path(scratch, task.name, "validation.jsonl").replace(file)
        rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return [Prompt(row["input"], tuple(row["outputs"])) for row in rows]

    def _arguments(self, task: Task, length: int, max_tokens: int, spare: int) -> list[str]:
        if task.kind == "freq_words_extraction":
            length -= spare  # it does not care what the answer needs
        else:
            max_tokens += spare  # other texts are made below 4,096 tokens than from there on
        values = {
            "save_name": task.name,
            "max_seq_length": length,
            "tokens_to_generate": max_tokens,
            "num_samples": self.num_prompts,
            "random_seed": PUBLISHED_SEED + self.seed,
            "template": task.template,
        }
        return [*task.arguments, *(f"--{name}={value}" for name, value in values.items())]

    def _cached(self, task: Task, length: int, arguments: list[str]) -> Path:
        runner = Path(ruler_runner.__file__).read_text(encoding="utf-8")
        decides: list[Any] = [PACKAGE.requirement, arguments, self._fingerprint, runner]
        if task.kind in ("niah", "common_words_extraction"):
            decides.append(version("wonderwords"))
        if "essay" in task.arguments:
            decides.append(ruler_runner.has_punkt())
        digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
        return default_cache_dir() / "ruler" / f"{task.name}-{length}-{digest}.jsonl"

    @cached_property
    def _fingerprint(self) -> str:
        """A digest of the tokenizer's files."""
        digest = hashlib.sha256()
        for path in sorted(path for path in self.tokenizer.rglob("*") if path.is_file()):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def _run(self, task: Task, length: int, arguments: list[str]) -> None:
        command = [sys.executable, ruler_runner.__file__, str(task.script), *arguments]
        command += ["--tokenizer_type", "hf", "--tokenizer_path", str(self.tokenizer)]
        # Many times what it takes: it tries longer and longer texts, then makes each prompt.
        timeout = 300 + length // 20 + self.num_prompts * length // 50_000
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        try:
            # Its data is UTF-8, which it opens by the machine's encoding.
            done = subprocess.run(
                command, timeout=timeout, env={**os.environ, "PYTHONUTF8": "1"}, **options
            )
        except subprocess.TimeoutExpired:
            raise EvaluationError(
                f"RULER's generator of {task.name} has not ended after {timeout} s: ask for "
                "another length, or leave the task out"
            ) from None
        if done.returncode == ruler_runner.NOTHING_FITS:
            raise no_text(task, length)
        if done.returncode:
            raise EvaluationError(
                f"RULER's generator of {task.name} failed: {done.stderr.strip()[-1000:]}"
            )


def no_text(task: Task, length: int) -> EvaluationError:
    """What to say where a task cannot be had so short."""
    return EvaluationError(
        f"RULER has no text for {task.name} that fits {length} tokens with this tokenizer: ask for "
        "a larger length, or leave the task out"
    )


def _check_packages() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise EvaluationError(
            f"RULER's generators need {', '.join(missing)}: pip install '.[eval]' in a checkout"
        )
