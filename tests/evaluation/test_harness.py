"""lm-evaluation-harness's tasks, without an engine: what is refused, sent, checked and reported."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager

from tests.evaluation.stand_in import StandIn, standing_in
from vllm_kvselect.evaluation import cut_check, harness, harness_tasks
from vllm_kvselect.evaluation.harness import HarnessScore
from vllm_kvselect.evaluation.harness_outputs import GENERATES, output_types
from vllm_kvselect.evaluation.harness_tasks import prepare
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import load_tokenizer
from vllm_kvselect.planning.cuts import cuts

LISTS = sorted((Path(__file__).parents[2] / "configs" / "evaluation").glob("*.yaml"))
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{text}}}} The answer is"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: {metric}}}]
{more}
"""
GENERATION = "generation_kwargs: {temperature: 1, do_sample: false, until: ['.'], max_gen_toks: 16}"
GROUP = "group: of_both\ntask: [answers, {group: inside, task: [{task: choices}]}]"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tasks whose documents have two lengths, a group of them, and a tag."""
    # lm-evaluation-harness takes seconds to look through the thousands of its own.
    alone = partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(harness_tasks, "TaskManager", alone)
    data = tmp_path / "data.json"
    documents = [
        {"text": "word " * length, "answer": answer, "max_length": length}
        for length, answer in ((300, "42"), (300, "43"), (300, "42"), (600, "42"), (600, "43"))
    ]
    data.write_text("\n".join(map(json.dumps, documents)))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, output_type, metric, more in (
        ("answers", GENERATES, "exact_match", GENERATION + "\ntag: tagged"),
        ("short", GENERATES, "exact_match", GENERATION.replace("16", "1")),
        ("choices", "multiple_choice", "acc", 'tag: tagged\ndoc_to_choice: ["42", "43"]'),
        ("likelihoods", "loglikelihood", "perplexity", ""),
    ):
        text = TASK.format(name=name, data=data, output_type=output_type, metric=metric, more=more)
        (folder / f"{name}.yaml").write_text(text)
    (folder / "group.yaml").write_text(GROUP)
    return folder


def parse(folder: Path, *tasks: str, **values: Any) -> EvaluationConfig:
    given = {"suite": "harness", "through": "engine", "tasks": tasks, "data": str(folder)}
    return EvaluationConfig.parse(
        {"methods": ("snapkv",), **given, "out": folder / "out", **values}
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("answers", {"answers": GENERATES}),
        ("likelihoods", {"likelihoods": "loglikelihood"}),
        ("tagged", {"answers": GENERATES, "choices": "multiple_choice"}),
        ("of_both", {"answers": GENERATES, "choices": "multiple_choice"}),
        ("choices.yaml", {"choices": "multiple_choice"}),
        ("group.yaml", {"answers": GENERATES, "choices": "multiple_choice"}),
        (
            {"group": "g", "task": ["choices", {"task": "likelihoods"}], "output_type": GENERATES},
            {"choices": GENERATES, "likelihoods": GENERATES},
        ),
        ({"task": "answers", "output_type": "loglikelihood"}, {"answers": "loglikelihood"}),
    ],
)
def test_output_types_are_known_through_groups_tags_and_files(
    spec: Any, expected: dict[str, str], folder: Path
) -> None:
    index = TaskManager(include_path=folder, include_defaults=False).task_index
    if str(spec).endswith(".yaml"):
        spec = str(folder / spec)
    assert dict(output_types(spec, index)) == expected


@pytest.fixture(scope="module")
def index() -> Any:
    return TaskManager().task_index


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_every_task_of_our_lists_exists_and_generates(path: Path, index: Any) -> None:
    found = dict(output_types(str(path), index))
    assert set(found.values()) == {GENERATES}
    assert len(found) == {"ruler-no-data.yaml": 6, "longbench.yaml": 16}[path.name]
    command = "#   vllm-kvselect evaluate harness --through engine --tasks "
    assert f"{command}configs/evaluation/{path.name}\n" in path.read_text()


@pytest.mark.parametrize("tasks", [("likelihoods",), ("answers", "choices"), ("of_both",)])
def test_tasks_that_do_not_generate_are_refused_by_name_before_anything_starts(
    tasks: tuple[str, ...], folder: Path
) -> None:
    (folder.parent / "data.json").unlink()  # nor is their data looked at
    name = "likelihoods" if "likelihoods" in tasks else "choices"
    with pytest.raises(EvaluationError, match=f"^{name}: scored by log-likelihood, which comes fr"):
        next(harness.run(parse(folder, *tasks)))


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        ((), "has no tasks of its own choice: name some"),
        (("answer",), r"neither a task or group .* nor a file, did you mean .*answers"),
        (("short",), "answers of short have one token, which comes before anything is dropped"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tasks: tuple[str, ...], reason: str, folder: Path
) -> None:
    with pytest.raises(EvaluationError, match=reason):
        prepare(parse(folder, *tasks), load_tokenizer(""))


def test_data_that_cannot_be_had_is_an_error_with_the_reason(folder: Path) -> None:
    (folder.parent / "data.json").unlink()
    with pytest.raises(EvaluationError, match=r"cannot load answers: .*data\.json"):
        prepare(parse(folder, "answers"), load_tokenizer(""))


def test_examples_are_counted_for_each_length(folder: Path) -> None:
    prepared = prepare(parse(folder, "answers", num_examples=1), load_tokenizer(""))
    assert prepared.documents == {"answers": [0, 3]}
    assert sorted(prepared.prompt_lens.values()) == [304, 604]
    assert prepared.longest == 604 + 16
    several = prepare(parse(folder, "answers", num_examples=2, max_tokens=5), load_tokenizer(""))
    assert several.documents == {"answers": [0, 1, 3, 4]}
    assert several.longest == 604 + 5


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(cut_check, "_SECONDS", 0.3)
    with standing_in(StandIn()) as found:
        yield found


def config_of(folder: Path, server: StandIn, **values: Any) -> EvaluationConfig:
    given = {"url": server.url, "methods": ("snapkv", "knorm"), "budgets": (128, 0.5)}
    return parse(folder, "answers", **{**given, **values})


def test_every_setting_is_asked_for_and_its_scores_come_back(folder: Path, server: StandIn) -> None:
    config = config_of(folder, server)
    found = list(harness.run(config))
    bodies = server.bodies[5:]  # after one request to see that each is allowed
    asked: list[dict[str, Any]] = [{"kv_eviction": "none", "kv_prefill": "dense"}]
    for method in ("snapkv", "knorm"):
        for budget in (128, 0.5):
            settings = {"kv_eviction": method, "kv_eviction_budget": budget}
            settings |= {"kv_eviction_decode_budget": 0, "kv_eviction_prompt_interval": 0}
            asked.append({**settings, "kv_prefill": "dense"})
    assert [body["vllm_xargs"] for body in bodies] == [each for each in asked for _ in range(5)]
    assert {(b["temperature"], b["max_tokens"], *b["stop"]) for b in bodies} == {(0.0, 16, ".")}
    tokenizer = load_tokenizer("")
    expected = [304, 304, 304, 604, 604]
    for start in range(0, 25, 5):
        prompts = [body["prompt"][0] for body in bodies[start : start + 5]]
        assert sorted(map(len, prompts)) == expected
        assert tokenizer.decode(prompts[0]).endswith(" word  The answer is")

    settings = config.settings("regular")
    evictions = [None, *config.evictions()]
    for setting, eviction, scores in zip(settings, evictions, found, strict=True):
        shares = [
            1 - (cuts(n, 32, eviction).num_freed(n) if eviction else 0) * 32 / n for n in expected
        ]
        (score,) = scores
        # The server says " 42", which is right three times out of five but for the space.
        assert score == HarnessScore(
            "answers", "exact_match", "none", setting, 0.0, 5, pytest.approx(sum(shares) / 5)
        )
    server.text = "42"
    done = settings[:-1]
    ((score,),) = harness.run(config, done)
    assert (score.value, score.setting) == (0.6, settings[-1])


def test_results_and_samples_are_kept(folder: Path, server: StandIn) -> None:
    config = config_of(folder, server, methods=("snapkv",), budgets=(0.5,))
    assert len(list(harness.run(config))) == 2
    names = {path.name for path in (config.out / "harness").iterdir()}
    settings = ("none", "snapkv-0.5")
    assert names == {f"{each}{end}" for each in settings for end in (".json", "-samples.jsonl")}
    summary = json.loads((config.out / "harness" / "snapkv-0.5.json").read_text())
    assert summary["results"]["answers"]["exact_match,none"] == 0.0
    lines = (config.out / "harness" / "snapkv-0.5-samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["doc"]["answer"] for sample in samples] == ["42", "43", "42", "42", "43"]
    assert {sample["resps"][0][0] for sample in samples} == {" 42"}


def test_no_score_comes_from_a_server_that_drops_nothing(folder: Path, server: StandIn) -> None:
    server.drops = False
    config = config_of(folder, server)
    found = harness.run(config)
    (full,) = next(found)
    assert full.setting.method == "none"
    with pytest.raises(EvaluationError, match=r"of 0 prompts .* where 5 prompts"):
        next(found)
    assert not (config.out / "harness" / "snapkv-128.json").exists()


def test_a_server_too_small_for_a_prompt_is_refused(folder: Path, server: StandIn) -> None:
    with pytest.raises(EvaluationError, match=r"takes 2048 tokens, .* the longest here has 2605"):
        next(harness.run(config_of(folder, server, max_tokens=2000)))
