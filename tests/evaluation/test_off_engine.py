from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from papers.continuation import continue_prompt
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.engine.random_hybrids import lfm2
from tests.probe_files import probe_of
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation import off_engine
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.predictions import Prediction, Setting
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig
from vllm_kvselect.offline.answers import forced
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.kvzip import kvzip_scores
from vllm_kvselect.offline.retained import Prompt, retained_entries
from vllm_kvselect.offline.tasks import SCENARIOS, Scenario

METHODS = ("snapkv", "layer-thetakv", "random", "layer-probe", "kvzip-perturb")
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def examples(token_ids: list[int]) -> list[Example]:
    """Two questions about one text, and one about another."""
    # The first one does not end at a block border: what is left of it reads what is retained.
    text, other = tuple(token_ids[:79]), tuple(reversed(token_ids[:80]))
    parts = [(text, token_ids[80:88]), (text, token_ids[84:90]), (other, token_ids[80:86])]
    return [
        Example(
            name=f"copy/96/{index}",
            task="copy",
            length=96,
            context=context,
            question=tuple(question),
            references=("x",),
            metric="exact",
            max_tokens=MAX_TOKENS,
            target=tuple(token_ids[:4]),
        )
        for index, (context, question) in enumerate(parts)
    ]


def make_config(folder: Path, **values: Any) -> EvaluationConfig:
    given = {
        "suite": "needles",
        "model": str(folder),
        "dtype": "float32",
        "methods": METHODS,
        "budgets": (0.5, 0.25),
        "block_size": 4,
        "scenarios": SCENARIOS,
        "eviction": {"window": 8, "probe": str(probe_of(folder))},
    }
    return EvaluationConfig.parse(given | values)


def answers(
    config: EvaluationConfig, examples: list[Example], done: set[tuple[str, Setting]] | None = None
) -> list[Prediction]:
    return [each for some in off_engine.answer(config, examples, done or set()) for each in some]


@pytest.fixture(scope="module")
def predictions(llama_folder: Path, examples: list[Example]) -> list[Prediction]:
    return answers(make_config(llama_folder), examples)


def alone(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    scenario: Scenario,
    eviction: EvictionConfig | None,
) -> tuple[list[int], float, float]:
    """The answer with nothing shared or batched: the whole sequence again for every token."""
    position = len(example.prompt)
    if scenario == "context-only":
        position = len(example.context) // 4 * 4
    layers = capture(model, list(example.prompt))
    retained = torch.ones((len(layers), len(layers[0].key), position), dtype=torch.bool)
    if eviction is not None:
        prompt = Prompt(
            layers,
            position,
            4,
            probe=load_file(str(eviction.probe))["weights"],
            replayed=kvzip_scores(model, tokenizer, layers, list(example.prompt[:position])),
        )
        retained = retained_entries(prompt, eviction)
    question = list(example.prompt[position:])

    def continued(following: list[int]) -> torch.Tensor:
        return continue_prompt(model, layers, example.prompt[:position], following, retained).logits

    nll, accuracy = forced(continued([*question, *example.target]), list(example.target))
    answer: list[int] = []
    while len(answer) < MAX_TOKENS:
        if not answer and scenario == "regular":
            logits = model(torch.tensor([example.prompt])).logits[0, -1]
        else:
            logits = continued([*question, *answer])[-1]
        answer.append(int(logits.argmax()))
    return answer, nll, accuracy


def test_every_example_is_answered_in_every_setting(
    predictions: list[Prediction], examples: list[Example], llama_folder: Path
) -> None:
    config = make_config(llama_folder)
    expected = {
        (example.name, setting)
        for example in examples
        for scenario in SCENARIOS
        for setting in config.settings(scenario)
    }
    assert len(expected) == len(examples) * 2 * (1 + 2 * len(METHODS)) == len(predictions)
    assert {(each.example, each.setting) for each in predictions} == expected


def assert_as_alone(
    predictions: list[Prediction],
    examples: list[Example],
    model: PreTrainedModel,
    config: EvaluationConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chosen = {(each.method, each.budget): each for each in config.evictions()}
    by_name = {example.name: example for example in examples}
    texts = set()
    for each in predictions:
        eviction = chosen.get((each.method, each.budget))
        answer, nll, accuracy = alone(
            model, tokenizer, by_name[each.example], each.scenario, eviction
        )
        assert each.text == tokenizer.decode(answer, skip_special_tokens=True)
        assert each.num_tokens == MAX_TOKENS
        assert each.nll == pytest.approx(nll, abs=1e-3)
        assert each.accuracy == pytest.approx(accuracy)
        texts.add(each.text)
    assert len(texts) > len(predictions) / 3, "the settings must give different answers"


def test_batched_answers_are_those_of_each_alone(
    predictions: list[Prediction],
    examples: list[Example],
    llama: PreTrainedModel,
    llama_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert_as_alone(predictions, examples, llama, make_config(llama_folder), tokenizer)


def test_a_hybrids_answers_are_those_of_each_alone(
    examples: list[Example], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Its states come from the whole text, and from no more than that."""
    torch.manual_seed(0)
    hybrid = lfm2().eval()
    hybrid.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    hybrid.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = make_config(tmp_path, methods=("layer-thetakv", "layer-probe"))
    assert_as_alone(answers(config, examples), examples, hybrid, config, tokenizer)


def test_retained_shares_are_those_of_the_plan(predictions: list[Prediction]) -> None:
    shares = {each.budget: each.retained for each in predictions if each.scenario == "context-only"}
    assert shares[None] == 1.0
    assert 0.25 <= shares[0.25] < 0.35 < 0.5 <= shares[0.5] < 0.6


def test_what_is_done_is_left_out(
    predictions: list[Prediction], examples: list[Example], llama_folder: Path
) -> None:
    done = {(each.example, each.setting) for each in predictions}
    left = {(examples[1].name, each) for each in make_config(llama_folder).settings("regular")[2:4]}
    assert left < done
    again = answers(make_config(llama_folder), examples, done - left)
    assert {(each.example, each.setting): each for each in again} == {
        (each.example, each.setting): each
        for each in predictions
        if (each.example, each.setting) in left
    }


def test_more_settings_than_fit_side_by_side(
    predictions: list[Prediction],
    examples: list[Example],
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(off_engine, "ROWS_AT_ONCE", 3)
    found = answers(make_config(llama_folder), examples)
    assert [each.text for each in found] == [each.text for each in predictions]


@pytest.fixture
def regular(predictions: list[Prediction]) -> Prediction:
    """The full cache's answer to the first example."""
    return next(each for each in predictions if each.method == FULL)


def test_an_answer_ends_before_a_stop_text(
    regular: Prediction, examples: list[Example], llama_folder: Path
) -> None:
    stop = regular.text[len(regular.text) // 2 :][:3]
    config = make_config(llama_folder, methods=(), scenarios=("regular",))
    (found,) = answers(config, [replace(examples[0], stop=("never", stop))])
    assert found.text == regular.text.split(stop)[0]
    assert found.num_tokens < regular.num_tokens


@pytest.mark.parametrize(("metric", "ends"), [("exact", True), ("qa_f1", False)])
def test_a_right_answer_goes_on_only_where_it_could_become_worse(
    metric: str, ends: bool, regular: Prediction, examples: list[Example], llama_folder: Path
) -> None:
    right = replace(examples[0], metric=metric, references=(regular.text.strip()[:3],))
    config = make_config(llama_folder, methods=(), scenarios=("regular",))
    (found,) = answers(config, [right])
    assert regular.text.startswith(found.text)
    assert (found.num_tokens < MAX_TOKENS) == ends


def test_an_answer_ends_with_an_end_token(
    regular: Prediction,
    examples: list[Example],
    llama: PreTrainedModel,
    llama_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    answer, _, _ = alone(llama, tokenizer, examples[0], "regular", None)
    llama.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(llama_folder)
    other.eos_token = tokenizer.convert_ids_to_tokens(answer[2])
    other.save_pretrained(tmp_path)
    config = make_config(tmp_path, methods=(), scenarios=("regular",))
    (found,) = answers(config, [examples[0]])
    end = answer.index(answer[2])
    assert found.text == tokenizer.decode(answer[:end], skip_special_tokens=True)
    assert found.num_tokens == end + 1 < MAX_TOKENS


def test_context_only_needs_a_text_of_its_own(examples: list[Example], llama_folder: Path) -> None:
    joined = replace(examples[0], context=examples[0].prompt, question=())
    with pytest.raises(EvaluationError, match="copy does not tell text and question apart"):
        answers(make_config(llama_folder), [joined])
