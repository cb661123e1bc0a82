"""Tasks of lm-evaluation-harness with their data and prompts."""

import logging
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.tasks import TaskManager

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.harness_outputs import (
    GENERATES,
    output_types,
    refuse_log_likelihood,
)
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prepared:
    """Tasks with their data.

    Attributes:
        tasks: By name.
        documents: Indices of the documents that are asked about, by task.
        prompt_lens: Tokens of every prompt, by its text.
        longest: Tokens of the longest prompt and its answer.
    """

    tasks: "dict[str, Task]"
    documents: dict[str, list[int]]
    prompt_lens: dict[str, int]
    longest: int


def prepare(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> Prepared:
    """Loads tasks and builds their prompts.

    Args:
        config: Names of tasks and groups or files with them, a folder with further ones, lengths,
            and how many documents of each length are asked about.
        tokenizer: The model's.

    Raises:
        EvaluationError: If a task is unknown, does not generate, generates a single token only, or
            its data cannot be had.
    """
    if not config.tasks:
        raise EvaluationError(
            "lm-evaluation-harness has no tasks of its own choice: name some with --tasks, or a "
            "file such as configs/evaluation/ruler-no-data.yaml"
        )
    # It warns of everything that it is told, once for each task.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    metadata: dict[str, Any] = {"tokenizer": tokenizer.name_or_path}
    if config.lengths:
        metadata["max_seq_lengths"] = list(config.lengths)
    manager = TaskManager(include_path=config.data or None, metadata=metadata)
    known = [each for spec in config.tasks for each in output_types(spec, manager.task_index)]
    refuse_log_likelihood(name for name, output_type in known if output_type != GENERATES)
    tasks = _load(manager, config)
    documents = {name: _chosen(task, config.num_examples) for name, task in tasks.items()}
    for name, task in tasks.items():
        _build(task, documents[name], config.seed)
    return Prepared(tasks, documents, *_sizes(tasks, tokenizer, config.max_tokens))


def examples(
    task: str, samples: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase"
) -> list[Example]:
    """Turns what lm-evaluation-harness logged of a RULER task into examples, prompt by prompt.

    Args:
        task: Its name.
        samples: Logged samples.
        tokenizer: The model's.

    Returns:
        Examples whose prompts are the same tokens; text and question are not told apart.
    """
    found = []
    for sample in samples:
        prompt, settings = sample["arguments"][0]
        document = sample["doc"]
        found.append(
            Example(
                name=f"{task}/{document['max_length']}/{sample['doc_id']}",
                task=task,
                length=document["max_length"],
                context=tuple(tokenizer(prompt, add_special_tokens=False).input_ids),
                question=(),
                references=tuple(document["outputs"]),
                metric="string_match_all",
                max_tokens=settings["max_gen_toks"],
                stop=tuple(settings["until"]),
            )
        )
    return found


def _load(manager: TaskManager, config: EvaluationConfig) -> "dict[str, Task]":
    """Loads all tasks; some make their own data, at random, and print what they do."""
    random.seed(config.seed)
    np.random.seed(config.seed)
    try:
        with redirect_stdout(sys.stderr):
            found: dict[str, Task] = manager.load(list(config.tasks))["tasks"]
    except Exception as error:  # whatever a task does: hubs, packages, code of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EvaluationError(
            f"lm-evaluation-harness cannot load {', '.join(config.tasks)}: {reason}; if it is the "
            "data that cannot be had, give a folder with tasks that read it from the disk (--data)"
        ) from error
    return found


def _chosen(task: "Task", num_examples: int) -> list[int]:
    """The first documents of each length: documents of all lengths of a RULER task are one list."""
    found: Counter[Any] = Counter()
    chosen = []
    for index, document in enumerate(task.eval_docs):
        length = document.get("max_length")
        if found[length] < num_examples:
            found[length] += 1
            chosen.append(index)
    return chosen


def _build(task: "Task", documents: list[int], seed: int) -> None:
    """Builds the prompts as they will be built again, for every setting."""
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(seed)
    task.build_all_requests(samples=documents)
    refuse_log_likelihood(
        task.task_name for each in task.instances if each.request_type != GENERATES
    )


def _sizes(
    tasks: "dict[str, Task]", tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None
) -> tuple[dict[str, int], int]:
    """Tokens of every prompt, and of the longest one with its answer."""
    prompt_lens: dict[str, int] = {}
    longest = 0
    for name, task in tasks.items():
        for instance in task.instances:
            prompt, settings = instance.args
            answer_len = max_tokens or settings["max_gen_toks"]
            if answer_len == 1:
                raise EvaluationError(
                    f"answers of {name} have one token, which comes before anything is dropped: "
                    "every method would look perfect; leave it out or give more --max-tokens"
                )
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
            prompt_lens[prompt] = len(ids)
            longest = max(longest, len(ids) + answer_len)
    return prompt_lens, longest
