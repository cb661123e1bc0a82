"""LongBench in its official layout, made here of tiny texts; prompts against lm-eval's own."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import apply_template
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, PreTrainedTokenizerBase

from tests.own_process import python
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import METRICS
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites import longbench_files
from vllm_kvselect.evaluation.suites.longbench import METRIC_OF, longbench
from vllm_kvselect.evaluation.suites.longbench_files import Row, Task
from vllm_kvselect.offline.errors import EvaluationError

MAX_TOKENS = {
    "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "hotpotqa": 32, "2wikimqa": 32,
    "musique": 32, "gov_report": 512, "qmsum": 512, "multi_news": 512, "trec": 64, "triviaqa": 32,
    "samsum": 128, "passage_count": 32, "passage_retrieval_en": 32, "lcc": 64, "repobench-p": 64,
}  # fmt: skip
"""What an answer may have by LongBench's own configuration."""
WITHOUT_QUESTION = {"gov_report", "multi_news", "passage_count", "lcc"}
LABELS = ["Food", "Date", "Other entity"]


def row(name: str, index: int, num_sentences: int = 6) -> dict[str, Any]:
    text = " ".join(f"Sentence {n} of text {index} in {name}." for n in range(num_sentences))
    return {
        "input": "" if name in WITHOUT_QUESTION else f"What is asked of text {index}?",
        "context": text,
        "answers": [f"answer {index}", "another"],
        "length": len(text.split()),
        "dataset": name,
        "language": "en",
        "all_classes": LABELS if name == "trec" else None,
        "_id": f"{name}{index}",
    }


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longbench")
    for name in METRIC_OF:
        write(folder / "data", name, [row(name, index) for index in range(3)])
    return folder


def examples(
    tokenizer: PreTrainedTokenizerBase, folder: Path | str, **values: Any
) -> list[Example]:
    values = {"suite": "longbench", "data": str(folder), "num_examples": 2, **values}
    return longbench(EvaluationConfig.parse({"methods": ("snapkv",)} | values), tokenizer)


def test_every_set_is_there_with_its_metric_and_its_length(
    tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    found = examples(tokenizer, folder)
    assert len({example.name for example in found}) == 2 * len(METRIC_OF)
    assert {example.task: example.max_tokens for example in found} == MAX_TOKENS
    for example in found:
        assert example.metric in METRICS
        assert example.length == 8192  # the small model's positions
        index = example.name.removeprefix(f"{example.task}/8192/")
        assert example.references == (f"answer {index}", "another")
        assert example.classes == (tuple(LABELS) if example.task == "trec" else ())
        assert not example.stop


@pytest.mark.parametrize("name", METRIC_OF)
def test_prompts_are_those_of_the_harness(
    name: str, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "tasks" / "longbench" / f"{name}.yaml"
    template = load_yaml(path, resolve_func=False)["doc_to_text"]
    for index, example in enumerate(examples(tokenizer, folder, tasks=(name,))):
        line = row(name, index)
        expected = apply_template(template, {**line, "question": line["input"]})
        assert tokenizer.decode(example.prompt) == expected
        assert tokenizer.decode(example.context).endswith(line["context"])
        question = tokenizer.decode(example.question)
        assert question
        assert line["input"] in question
        assert line["context"] not in question


def test_line_ends_of_a_prompt_are_kept() -> None:
    task = Task("lcc", "Complete:\n{{context}}", "{{question}}Next line:\n", 64, ("", "", ""))
    assert task.texts(Row("a = 1\n", "b = 2\n", (), ())) == (
        "Complete:\na = 1\n",
        "b = 2\nNext line:\n",
    )


def test_braces_in_a_text_are_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    line = row("lcc", 0) | {"context": "x = f'{{y}} {{ context }} {% if %}'\n\n"}
    write(tmp_path, "lcc", [line])
    (example,) = examples(tokenizer, tmp_path, tasks=("lcc",))
    assert tokenizer.decode(example.context).endswith(line["context"])


@pytest.mark.parametrize("length", [400, 401])
def test_long_prompts_lose_their_middle_and_nothing_of_the_question(
    length: int, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write(tmp_path, "qasper", [row("qasper", 0, num_sentences=300)])
    values: dict[str, Any] = {"tasks": ("qasper",), "max_tokens": 40}
    (whole,) = examples(tokenizer, tmp_path, **values)
    (cut,) = examples(tokenizer, tmp_path, **values, lengths=(length,))
    half = (length - 40) // 2
    assert cut.prompt == whole.prompt[:half] + whole.prompt[-half:]
    assert cut.question == whole.question
    assert cut.length == length
    assert cut.max_tokens == 40


def test_a_question_longer_than_half_of_the_room_is_kept(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    line = row("qasper", 0, num_sentences=300) | {"input": "why " * 150 + "indeed?"}
    write(tmp_path, "qasper", [line])
    values: dict[str, Any] = {"tasks": ("qasper",), "max_tokens": 20}
    (whole,) = examples(tokenizer, tmp_path, **values)
    (cut,) = examples(tokenizer, tmp_path, **values, lengths=(320,))
    assert len(cut.prompt) == 300
    assert 150 < len(cut.question) < 300
    assert cut.question == whole.question
    assert cut.context == whole.context[: 300 - len(cut.question)]
    values["max_tokens"] = 60
    with pytest.raises(EvaluationError, match="qasper: 196 tokens for a prompt are too few"):
        examples(tokenizer, tmp_path, **values, lengths=(256,))


def test_a_prompt_that_just_fits_is_whole(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write(tmp_path, "qasper", [row("qasper", 0, num_sentences=60)])
    (whole,) = examples(tokenizer, tmp_path, tasks=("qasper",))
    fits = len(whole.prompt) + whole.max_tokens
    for length, num_missing in ((fits, 0), (fits - 1, 1)):
        (found,) = examples(tokenizer, tmp_path, tasks=("qasper",), lengths=(length,))
        # The official script keeps two halves: of an odd room, one token less.
        odd = num_missing and (length - whole.max_tokens) % 2
        assert len(found.prompt) == len(whole.prompt) - num_missing - odd


def test_bos_token_stands_first_and_is_counted(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write(tmp_path, "qasper", [row("qasper", 0, num_sentences=300)])
    with_bos = copy.deepcopy(tokenizer)
    (bos,) = tokenizer.encode("<|im_start|>")
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    values: dict[str, Any] = {"tasks": ("qasper",), "max_tokens": 40, "lengths": (400,)}
    (without,) = examples(tokenizer, tmp_path, **values)
    (example,) = examples(with_bos, tmp_path, **values)
    assert example.context[0] == bos
    assert example.context[1:180] == without.context[:179]
    assert bos not in example.context[1:] + example.question
    assert len(example.prompt) == 360


def test_length_is_the_models_unless_it_is_given(
    tokenizer: PreTrainedTokenizerBase, folder: Path, tmp_path: Path
) -> None:
    LlamaConfig(max_position_embeddings=777).save_pretrained(tmp_path)
    (example, _) = examples(tokenizer, folder, tasks=("trec",), model=str(tmp_path))
    assert example.length == 777
    with pytest.raises(EvaluationError, match="give one, the largest"):
        examples(tokenizer, folder, lengths=(400, 500))


def test_first_rows_of_the_sets_asked_for(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    found = examples(tokenizer, folder, tasks=("trec", "lcc"), num_examples=1)
    assert [example.name for example in found] == ["trec/8192/0", "lcc/8192/0"]
    found = examples(tokenizer, folder, tasks=("lcc",), num_examples=50)
    assert [example.name for example in found] == [f"lcc/8192/{index}" for index in range(3)]
    with pytest.raises(EvaluationError, match="no task 'dureader'; there are narrativeqa, qasper"):
        examples(tokenizer, folder, tasks=("dureader",))


def test_names_of_the_hubs_copy_are_read_too(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    line = row("qasper", 0)
    line["question"] = line.pop("input")
    write(tmp_path, "qasper", [line])
    (example,) = examples(tokenizer, tmp_path, tasks=("qasper",))
    assert line["question"] in tokenizer.decode(example.question)


def test_data_that_cannot_be_read_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError, match=r"neither .*data/lcc.jsonl nor .*/lcc.jsonl is"):
        examples(tokenizer, tmp_path, tasks=("lcc",))
    line = row("lcc", 1)
    del line["answers"]
    write(tmp_path, "lcc", [row("lcc", 0), line])
    with pytest.raises(EvaluationError, match=r"lcc.jsonl, line 2 is none .*'answers'"):
        examples(tokenizer, tmp_path, tasks=("lcc",))
    assert len(examples(tokenizer, tmp_path, tasks=("lcc",), num_examples=1)) == 1
    (tmp_path / "lcc.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"lcc.jsonl, line 1 is none"):
        examples(tokenizer, tmp_path, tasks=("lcc",))


def test_without_the_hub_the_folder_is_asked_for(tmp_path: Path) -> None:
    code = (
        "from vllm_kvselect.evaluation.suites.longbench_files import read_rows, read_task\n"
        "read_rows(read_task('lcc'), '', 1)"
    )
    result = python("-c", code, fails=True, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "EvaluationError: cannot load Xnhyacinth/LongBench (lcc) from the hub" in result.stderr
    assert "data.zip of the dataset THUDM/LongBench" in result.stderr
    assert "add --data FOLDER" in result.stderr


def test_without_the_harness_the_extra_is_named(
    tokenizer: PreTrainedTokenizerBase, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longbench_files, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"pip install '.\[eval\]' in a checkout"):
        examples(tokenizer, folder)


def test_a_harness_without_the_set_is_refused() -> None:
    with pytest.raises(EvaluationError, match="has no LongBench set nothing that can be read"):
        longbench_files.read_task("nothing")
