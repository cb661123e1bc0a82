"""The served engine, with one server for all tests: answers, checks, and lm-evaluation-harness."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from vllm_kvselect.cli import app
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation import cut_check, off_engine, served
from vllm_kvselect.evaluation.cut_check import CutCheck
from vllm_kvselect.evaluation.endpoint import Endpoint, Needs, endpoint, request_settings
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.predictions import read
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.given_answers import given_answers
from vllm_kvselect.evaluation.suites.needles import needles
from vllm_kvselect.evaluation.suites.own_answers import own_answers
from vllm_kvselect.evaluation.suites.stories import stories
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.tasks import SCENARIOS
from vllm_kvselect.tiny_model import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("evaluation")]  # one server for all

WINDOW, MAX_MODEL_LEN = 48, 1100
BUDGET = 128
SMALL = EvictionConfig(method="snapkv", budget=BUDGET, window=WINDOW)


def parse(**values: Any) -> EvaluationConfig:
    given = {
        "suite": "needles",
        "through": "engine",
        "dtype": "float32",
        "methods": ("snapkv", "layer-defensivekv"),
        "budgets": (BUDGET, 0.5),
        "eviction": {"window": WINDOW},
        "lengths": (450,),
        "num_examples": 5,  # more than are in flight at once
    }
    return EvaluationConfig.parse(given | values)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The small model as an evaluation serves it, with a window of its own."""
    config = parse(out=tmp_path_factory.mktemp("server"))
    with endpoint(config, Needs(MAX_MODEL_LEN, 12 * MAX_MODEL_LEN, reads_along=True)) as found:
        yield found


@pytest.fixture(scope="module")
def examples(tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    return needles(parse(), tokenizer)


def test_it_answers_as_the_model_does_off_the_engine(
    server: Endpoint, examples: list[Example]
) -> None:
    given = {"scenarios": SCENARIOS, "budgets": (BUDGET,)}
    config = parse(url=server.url, **given)
    found = list(served.answer(config, examples, set()))
    assert [{p.example for p in each} for each in found] == [{e.name} for e in examples]
    settings = [each for scenario in SCENARIOS for each in config.settings(scenario)]
    for each in found:
        assert [p.setting for p in each] == settings
    # By a metric that more text may lower: off the engine a right answer would end at once.
    whole = [replace(example, metric="qa_f1") for example in examples[:2]]
    expected = list(off_engine.answer(parse(through="model", **given), whole, set()))
    by_example = [a + b for a, b in zip(expected[::2], expected[1::2], strict=True)]
    for through_engine, off in zip(found[:2], by_example, strict=True):
        for a, b in zip(through_engine, off, strict=True):
            assert (a.text, a.num_tokens) == (b.text, b.num_tokens), a
            assert a.retained == pytest.approx(b.retained, abs=1e-9)
    texts = [{p.text for p in each} for each in found]
    assert max(map(len, texts)) > 1, "no setting changes an answer: nothing is compared"


def test_given_answers_are_as_likely_as_off_the_engine(
    server: Endpoint, tokenizer: PreTrainedTokenizerBase
) -> None:
    given = {"suite": "given-answers", "tasks": ("needles",), "num_examples": 1}
    given |= {"scenarios": SCENARIOS}
    config = parse(**given, url=server.url)
    examples = given_answers(config, tokenizer)
    (found,) = served.answer(config, examples, set())
    regular, context_only = off_engine.answer(parse(**given, through="model"), examples, set())
    for a, b in zip(found, regular + context_only, strict=True):
        assert (a.scenario, a.method, a.budget) == (b.scenario, b.method, b.budget)
        assert a.nll == pytest.approx(b.nll, abs=1e-3)
        assert a.accuracy == b.accuracy
    assert len({p.nll for p in found}) > 3, "no setting changes a likelihood: nothing is compared"


def test_own_answers_are_less_likely_where_rounds_drop_at_random(
    server: Endpoint, tokenizer: PreTrainedTokenizerBase
) -> None:
    few = "random:decode_budget=128:decode_interval=64"
    config = parse(
        suite="own-answers",
        url=server.url,
        tasks=("prose",),
        lengths=(400,),
        max_tokens=120,
        num_examples=1,
        methods=("random", few),
        budgets=(1.0,),
    )
    ((full, whole, dropped),) = served.answer(config, own_answers(config, tokenizer), set())
    assert dropped.method == few
    assert whole.nll == pytest.approx(full.nll, abs=1e-3)
    assert dropped.nll > full.nll + 0.05


def test_stories_are_sampled_and_the_same_every_time(
    server: Endpoint, tokenizer: PreTrainedTokenizerBase
) -> None:
    given = {"suite": "stories", "lengths": (), "num_examples": 2, "max_tokens": 24}
    config = parse(**given, url=server.url, methods=())
    told, again = (
        [p.text for (p,) in served.answer(config, stories(config, tokenizer), set())]
        for _ in range(2)
    )
    assert told == again
    assert len(set(told)) == 2


def test_a_sparse_prefill_drops_nothing(server: Endpoint, examples: list[Example]) -> None:
    sparse = "none:prefill=critiprefill:prefill_budget=128"
    config = parse(url=server.url, methods=(sparse,))
    ((full, found),) = served.answer(config, examples[:1], set())
    assert (found.method, found.budget, found.retained) == (sparse, None, 1.0)
    assert found.text == full.text  # the server prefills so few tokens densely


def test_what_is_done_is_not_asked_again(server: Endpoint, examples: list[Example]) -> None:
    config = parse(url=server.url)
    settings = config.settings("regular")
    done = {(e.name, s) for e in examples for s in settings}
    before = CutCheck(server.url)
    assert list(served.answer(config, examples, done)) == []
    done -= {(examples[1].name, settings[0]), (examples[1].name, settings[3])}
    ((first, second),) = served.answer(config, examples, done)
    assert (first.example, second.example) == (examples[1].name,) * 2
    assert (first.setting, second.setting) == (settings[0], settings[3])
    for eviction in (None, *config.evictions()):  # what is asked to see that it is allowed
        before.note(1, 1, eviction or EvictionConfig(method="none"))
    before.note(len(examples[1].prompt), 9, EvictionConfig(method="none"))
    before.note(len(examples[1].prompt), 9, config.evictions()[2])
    before.check()


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_request_is_due_from_its_second_token_on(
    num_tokens: int, server: Endpoint, examples: list[Example]
) -> None:
    prompt = examples[0].prompt
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def ask(**body: Any) -> Any:
            body |= {"model": server.model, "prompt": prompt, "temperature": 0}
            body |= {"vllm_xargs": request_settings(SMALL), "return_token_ids": True}
            return http.post("/v1/completions", json=body).raise_for_status().json()

        ids = ask(max_tokens=4)["choices"][0]["token_ids"]
        check = CutCheck(server.url)
        answered = ask(max_tokens=4, stop_token_ids=[ids[num_tokens - 1]])
    assert answered["usage"]["completion_tokens"] == num_tokens
    check.note(len(prompt), num_tokens, SMALL)
    check.check()


def test_a_server_that_was_not_asked_to_drop_is_found_out(
    server: Endpoint, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "request_settings", lambda _: {})
    monkeypatch.setattr(cut_check, "_SECONDS", 1.0)
    with pytest.raises(EvaluationError, match=r"of 0 prompts \(0 blocks\) where 8 prompts"):
        next(served.answer(parse(url=server.url, methods=("snapkv",)), examples, set()))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"budgets": (40,)}, r"refuses .*kv_eviction_budget = 40 retains 40 entries .*at least 80"),
        ({"lengths": (1200,)}, r"takes 1100 tokens, .*the longest here has 1200"),
        ({"eviction": {"alpha": 0.25}}, "alpha belong to the server, and .* does not say what it"),
        ({"eviction": {"window": 128}}, r"see that its window is the one given here with --set"),
        ({"max_tokens": 1}, "answers of needle have one token"),
    ],
)
def test_what_cannot_be_measured_on_a_running_server_is_refused(
    values: dict[str, Any],
    reason: str,
    server: Endpoint,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cut_check, "_SECONDS", 1.0)
    config = parse(**{"url": f"{server.url}/v1/", "num_examples": 1, **values})
    with pytest.raises(EvaluationError, match=reason):
        next(served.answer(config, needles(config, tokenizer), set()))


def task_of(examples: list[Example], tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """The same prompts as a task of lm-evaluation-harness."""
    documents = [
        {"prompt": tokenizer.decode(each.prompt), "digits": each.references[0]} for each in examples
    ]
    for example, document in zip(examples, documents, strict=True):
        assert tuple(tokenizer(document["prompt"]).input_ids) == example.prompt
    (folder / "needles.json").write_text("\n".join(map(json.dumps, documents)))
    digits = [{"function": "regex", "regex_pattern": r"^\s*(\d{7})"}, {"function": "take_first"}]
    task = {
        "task": "needles",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "needles.json")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{digits}}",
        "generation_kwargs": {"max_gen_toks": examples[0].max_tokens, "until": []},
        "filter_list": [{"name": "digits", "filter": digits}],
        "metric_list": [{"metric": "exact_match"}],
    }
    (folder / "needles.yaml").write_text(yaml.safe_dump(task))
    return folder / "needles.yaml"


def lm_eval(server: Endpoint, task: Path, **xargs: Any) -> tuple[float, list[str]]:
    """Score and answers as lm-evaluation-harness's own command line gives them."""
    out = task.parent / "theirs"
    model = {"model": server.model, "tokenizer": str(tiny_model()), "max_length": MAX_MODEL_LEN}
    model |= {"base_url": f"{server.url}/v1/completions", "num_concurrent": 4}
    command = [Path(sys.executable).with_name("lm_eval"), "--model", "local-completions"]
    command += ["--model_args", json.dumps(model), "--tasks", str(task), "--log_samples"]
    command += ["--gen_kwargs", json.dumps({"vllm_xargs": xargs}), "--output_path", str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(task.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,), (samples,) = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
    answered = map(json.loads, samples.read_text().splitlines())
    in_order = sorted(answered, key=lambda sample: sample["doc_id"])
    score = json.loads(results.read_text())["results"]["needles"]["exact_match,digits"]
    return score, [each["resps"][0][0] for each in in_order]


def test_lm_evaluation_harness_gets_the_same_answers_and_scores(
    server: Endpoint, tokenizer: PreTrainedTokenizerBase, examples: list[Example], tmp_path: Path
) -> None:
    check = CutCheck(server.url)
    task = task_of(examples, tokenizer, tmp_path)
    theirs = lm_eval(server, task, kv_eviction="snapkv", kv_eviction_budget=BUDGET)
    for example in examples:
        check.note(len(example.prompt), example.max_tokens, SMALL)
    check.check()

    command = ["evaluate", "needles", "--through", "engine", "--url", server.url]
    command += ["--methods", "snapkv", "--budgets", str(BUDGET), "--set", f"window={WINDOW}"]
    command += ["--lengths", "450", "--num-examples", "5"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "ours")])
    assert result.exit_code == 0, result.output
    answers = list(read(tmp_path / "ours" / "predictions.jsonl"))
    rows = json.loads((tmp_path / "ours" / "scores.json").read_text())["rows"]
    ours = {row["method"]: row["scores"]["needle"] for row in rows}
    assert theirs == (ours["snapkv"], [each.text for each in answers if each.method == "snapkv"])
    assert ours["none"] > ours["snapkv"], "no setting changes a score: nothing is compared"
