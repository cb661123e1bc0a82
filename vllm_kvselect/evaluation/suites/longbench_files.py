"""LongBench's prompts, which lm-eval has, and its data, from a folder or the hub."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, StrictUndefined

from vllm_kvselect.offline.errors import EvaluationError

_CONTEXT = "{{context}}"
_JINJA = Environment(undefined=StrictUndefined, keep_trailing_newline=True)


class Row(NamedTuple):
    """One line of a set; the question may be empty, and only classifications have classes."""

    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """What lm-eval says of a set.

    Templates of the prompt up to the end of the context and behind it; path, name and split at the
    hub.
    """

    name: str
    before: str
    after: str
    max_tokens: int
    hub: tuple[str, str, str]

    def texts(self, row: Row) -> tuple[str, str]:
        """The prompt of a row: up to the end of the context, and the rest."""
        values = row._asdict()
        before, after = map(_JINJA.from_string, (self.before, self.after))
        return before.render(values), after.render(values)


class _TaskFile(yaml.SafeLoader):
    """Reads a task file; the functions that it names are neither wanted nor imported."""


_TaskFile.add_constructor("!function", lambda loader, node: None)


def read_task(name: str) -> Task:
    """Reads a set's prompt and answer length out of the installed lm-eval.

    Raises:
        EvaluationError: If lm-eval is not installed, or does not have the set as we know it.
    """
    spec = find_spec("lm_eval")  # found and not imported: its code needs seconds
    if spec is None or spec.origin is None:
        raise EvaluationError(
            "LongBench's prompts are read out of lm-eval, which is not installed: "
            "pip install '.[eval]' in a checkout"
        )
    path = Path(spec.origin).parent / "tasks" / "longbench" / f"{name}.yaml"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _TaskFile)
        before, context, after = values["doc_to_text"].partition(_CONTEXT)
        return Task(
            name,
            before + context,
            after,
            values["generation_kwargs"]["max_gen_toks"],
            (values["dataset_path"], values["dataset_name"], values["test_split"]),
        )
    except (OSError, KeyError) as error:
        raise EvaluationError(
            f"the installed lm-eval has no LongBench set {name} that can be read here ({error}): "
            "pip install --upgrade '.[eval]' in a checkout"
        ) from None


def read_rows(task: Task, data: str, num_rows: int) -> list[Row]:
    """Reads the first rows of a set, all of them where there are fewer.

    `data` is a folder with `<set>.jsonl`, or with these in a folder `data`; empty for the hub.

    Raises:
        EvaluationError: If there is no such file, if a line is none of LongBench's, or if the hub
            cannot be read.
    """
    rows = _folder_rows(task.name, Path(data)) if data else _hub_rows(task)
    return list(islice(rows, num_rows))


def _folder_rows(name: str, folder: Path) -> Iterator[Row]:
    paths = [folder / "data" / f"{name}.jsonl", folder / f"{name}.jsonl"]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        raise EvaluationError(f"--data {folder}: neither {paths[0]} nor {paths[1]} is there")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _row(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise EvaluationError(
                    f"{path}, line {number} is none of LongBench's: {error!r}"
                ) from None


def _hub_rows(task: Task) -> Iterator[Row]:
    from datasets import load_dataset

    path, name, split = task.hub
    try:
        lines: Iterable[dict[str, Any]] = load_dataset(path, name, split=split)
    except Exception as error:  # of the hub's, the network's and the cache's many kinds
        raise EvaluationError(
            f"cannot load {path} ({name}) from the hub: {error}\n"
            "Without the hub: unpack data.zip of the dataset THUDM/LongBench "
            "(hf download THUDM/LongBench data.zip --repo-type dataset) and add --data FOLDER"
        ) from None
    return map(_row, lines)


def _row(line: dict[str, Any]) -> Row:
    """A line by LongBench's own names, or by those of lm-eval's copy: `input` is `question`."""
    question = line["question"] if "question" in line else line["input"]
    return Row(line["context"], question, tuple(line["answers"]), tuple(line["all_classes"] or ()))
