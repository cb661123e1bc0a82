"""RULER's examples; prompts are compared with what the published scripts make by themselves."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.ruler import ruler
from vllm_kvselect.evaluation.suites.ruler_generator import Generator
from vllm_kvselect.evaluation.suites.ruler_package import PACKAGE, Task
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.tiny_model import tiny_model

TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
    "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
NUM_EXAMPLES = 2


def config(**values: Any) -> EvaluationConfig:
    return EvaluationConfig.parse(
        {"suite": "ruler", "methods": ("snapkv",), "num_examples": NUM_EXAMPLES} | values
    )


def published(task: str, length: int, save_dir: Path) -> list[dict[str, Any]]:
    """What RULER's own `prepare.py` makes, with nothing of ours."""
    folder = PACKAGE.fetched()
    # Imported by transformers, it would draw a random number between the seed and the texts.
    (save_dir / "sitecustomize.py").write_text("import rich.style", encoding="utf-8")
    words = [sys.executable, str(folder / "data" / "prepare.py"), "--task", task]
    words += ["--save_dir", str(save_dir), "--max_seq_length", str(length)]
    words += ["--num_samples", str(NUM_EXAMPLES), "--tokenizer_type", "hf"]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder.parent}:{save_dir}",
    }
    subprocess.run(
        [*words, "--tokenizer_path", str(tiny_model())],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        timeout=300,
    )
    lines = (save_dir / task / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def text(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.decode(example.context) + tokenizer.decode(example.question)


NEEDLE_QUESTION = (
    "\nWhat is the special magic number for {0} mentioned in the provided text? "
    "The special magic number for {0} mentioned in the provided text is"
)


# No essays, which need NLTK's data. `fwe` fits 1,024 tokens by itself, as it does not everywhere.
@pytest.mark.parametrize(
    ("task", "length", "question"),
    [
        pytest.param("niah_multikey_2", 1024, NEEDLE_QUESTION, id="niah"),
        pytest.param("vt", 1024, "\nQuestion: Find all variables that are assigned ", id="vt"),
        pytest.param("cwe", 1024, "\nQuestion: What are the 10 most common words in ", id="cwe"),
        pytest.param("fwe", 1024, "\nQuestion: Do not provide any explanation. ", id="fwe"),
        pytest.param("qa_1", 2048, "\n\nAnswer the question based on the given ", id="qa"),
    ],
)
def test_prompts_are_the_published_ones_split_after_the_text(
    task: str,
    length: int,
    question: str,
    tokenizer: PreTrainedTokenizerBase,
    known: dict[str, Task],
    tmp_path: Path,
) -> None:
    examples = ruler(config(tasks=(task,), lengths=(length,)), tokenizer)
    rows = published(task, length, tmp_path)
    assert [text(each, tokenizer) for each in examples] == [row["input"] for row in rows]
    assert [list(each.references) for each in examples] == [row["outputs"] for row in rows]
    assert [each.name for each in examples] == [f"{task}/{length}/{i}" for i in range(NUM_EXAMPLES)]
    for each in examples:
        asked = tokenizer.decode(each.question)
        assert asked.startswith(question.partition("{0}")[0])
        assert question[:40] not in asked[1:]
        if "{0}" in question:
            context = tokenizer.decode(each.context)
            end = context.index(f" is: {each.references[0]}.")
            begin = context.rindex("One of", 0, end)
            assert asked == question.format(context[begin:end].partition(" for ")[2])
            assert each.depth == pytest.approx(begin / len(context), abs=0.001)
        else:
            assert each.depth is None
        assert (each.task, each.length, each.metric) == (task, length, known[task].metric)
        assert each.max_tokens == known[task].max_tokens
        assert 0.5 * length < len(each.prompt) + each.max_tokens <= length


def test_all_tasks_are_known(known: dict[str, Task]) -> None:
    assert tuple(known) == TASKS
    assert {name: task.max_tokens for name, task in known.items()}["niah_multiquery"] == 128
    assert [task.metric for task in known.values()] == ["string_match_all"] * 11 + [
        "string_match_part"
    ] * 2


def test_needles_between_sentences_of_essays(tokenizer: PreTrainedTokenizerBase) -> None:
    for example in ruler(config(tasks=("niah_multivalue",), lengths=(1024,)), tokenizer):
        context = tokenizer.decode(example.context)
        assert len(example.references) == 4
        for value in example.references:
            assert re.search(rf"One of the special magic numbers for [^.]+ is: {value}\.", context)
        assert example.depth is None
        assert tokenizer.decode(example.target) == " " + ", ".join(example.references)


def test_further_questions_about_a_text(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = {"tasks": ("niah_multikey_2",), "lengths": (1024,)}
    single = ruler(config(**asked), tokenizer)
    several = ruler(config(**asked, questions=3), tokenizer)
    assert [each.name for each in several[:4]] == [
        *(f"niah_multikey_2/1024/0.{number}" for number in range(3)),
        "niah_multikey_2/1024/1.0",
    ]
    for index, alone in enumerate(single):
        group = several[3 * index : 3 * index + 3]
        assert dataclasses.replace(group[0], name=alone.name) == alone
        assert len({each.context for each in group}) == 1
        assert len({each.references for each in group}) == 3
        assert group[1].depth < 0.5 < group[2].depth
        for each in group:
            key = tokenizer.decode(each.question).partition(" for ")[2].partition(" mentioned")[0]
            needle = f"One of the special magic numbers for {key} is: {each.references[0]}."
            assert tokenizer.decode(each.context).count(needle) == 1
            assert tokenizer.decode(each.target) == f" {each.references[0]}"


def test_the_seed_decides_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [
        ruler(config(tasks=("fwe",), lengths=(512,), seed=seed), tokenizer) for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1]
    assert {each.context for each in texts[0]}.isdisjoint(each.context for each in texts[2])


def test_texts_are_made_once(
    tokenizer: PreTrainedTokenizerBase,
    known: dict[str, Task],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, more_words = tmp_path / "words", tmp_path / "more-words"
    tokenizer.save_pretrained(words)
    larger = AutoTokenizer.from_pretrained(words)
    larger.add_tokens(["Belisarius"])
    larger.save_pretrained(more_words)
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    prompts = Generator(words, 1, 0).prompts(known["fwe"], 512, 50)
    (made,) = (cache / "vllm-kvselect" / "ruler").iterdir()  # and nothing half made
    assert made.suffix == ".jsonl"

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("started a process")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert Generator(words, 1, 0).prompts(known["fwe"], 512, 50) == prompts
    for other in (Generator(words, 2, 0), Generator(words, 1, 1), Generator(more_words, 1, 0)):
        with pytest.raises(AssertionError, match="started a process"):
            other.prompts(known["fwe"], 512, 50)


def test_unknown_tasks_and_other_data_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EvaluationError, match=r"no task 'niah'; there are niah_single_1, .*, qa_2"):
        ruler(config(tasks=("vt", "niah")), tokenizer)
    with pytest.raises(EvaluationError, match="leave out --data"):
        ruler(config(data="/somewhere"), tokenizer)
