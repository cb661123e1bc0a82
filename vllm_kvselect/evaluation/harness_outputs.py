"""Which tasks of lm-evaluation-harness generate: eviction touches nothing else."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from vllm_kvselect.offline.errors import EvaluationError

GENERATES = "generate_until"
"""The output type of tasks whose answers are generated; all others read likelihoods."""

_NUM_NAMED = 8


class _Loader(yaml.SafeLoader):
    """YAML whose tags stay unread: task files name Python functions with them."""


_Loader.add_multi_constructor("!", lambda *_: None)


def refuse_log_likelihood(names: Iterable[str]) -> None:
    """Refuses tasks on which every method would look perfect.

    Args:
        names: The tasks that do not generate.

    Raises:
        EvaluationError: If there is one.
    """
    if not (found := sorted(set(names))):
        return
    named = ", ".join(found[:_NUM_NAMED])
    if len(found) > _NUM_NAMED:
        named += f" and {len(found) - _NUM_NAMED} more"
    raise EvaluationError(
        f"{named}: scored by log-likelihood, which comes from the prefill. Entries are dropped "
        "after it, so every method would have the full cache's score; take tasks that generate "
        f"(output_type: {GENERATES})"
    )


def output_types(
    spec: str | dict[str, Any], index: Mapping[str, Any], inherited: str | None = None
) -> Iterator[tuple[str, str]]:
    """Output types of all tasks that a name stands for, as far as files say: no data is loaded.

    Args:
        spec: A task, a group, a tag, a file with a task or a group, or a member of a group.
        index: `TaskManager.task_index`.
        inherited: What a group says of its members.

    Yields:
        Name and output type.

    Raises:
        EvaluationError: If there is no such task or file.
    """
    name = spec
    if isinstance(spec, dict):
        name, inherited = spec.get("group") or spec["task"], spec.get("output_type", inherited)
    found = _definition(spec, str(name), index)
    inherited = inherited or found.get("output_type")
    if isinstance(found["task"], list):
        for member in found["task"]:
            yield from output_types(member, index, inherited)
    elif "class" not in found:  # a class only says so once it is made
        yield str(found["task"]), inherited or GENERATES


def _definition(spec: str | dict[str, Any], name: str, index: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a name where it is defined: in the index, in place, or in a file."""
    if name in index:
        entry = index[name]
        return {"task": sorted(entry.tags)} if entry.cfg is None else dict(entry.cfg)
    return spec if isinstance(spec, dict) else _read(name, index)


def _read(name: str, index: Iterable[str]) -> dict[str, Any]:
    """The task or group in a file."""
    path = Path(name)
    if not path.is_file():
        close = get_close_matches(name, list(index), 3)
        meant = f", did you mean {' or '.join(close)}?" if close else ""
        raise EvaluationError(
            f"{name} is neither a task or group of lm-evaluation-harness nor a file{meant}"
        )
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(found, dict) or "task" not in found:
        raise EvaluationError(f"{path} holds neither a task nor a group of lm-evaluation-harness")
    return found
