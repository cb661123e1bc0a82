"""Answers of peers to the examples of an evaluation, as predictions for `evaluate --also`."""

import json
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field
from rich.console import Console
from rich.progress import Progress

from peers.methods import PEER_METHODS
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.predictions import Budget, Prediction, Setting
from vllm_kvselect.evaluation.settings import ENGINE_SUITES, FULL
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import load_tokenizer, model_folder
from vllm_kvselect.offline.parsing import Settings
from vllm_kvselect.offline.tasks import Scenario
from vllm_kvselect.planning.cuts import budget_entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reply = dict[str, Any]
"""What a worker says of an example: `example`, its name; `tokens`, the answer; `retained`, a share
of the entries; and, where it is measured, `nll` and `accuracy`."""


class PeerConfig(Settings):
    """What a peer is asked, beside the examples of an evaluation.

    Attributes:
        peer: Who answers.
        suite: Whose examples they are.
        model: As in `EvaluationConfig`.
        dtype: Of weights and activations; empty for float32.
        seed: Of methods that draw.
        scenarios: As in `EvaluationConfig`.
        methods: Of `PEER_METHODS`, besides the full cache, which is always measured.
        budgets: As in `EvaluationConfig`.
    """

    model_config = ConfigDict(extra="ignore")  # an evaluation says more

    peer: Literal["kvpress", "openvino"]
    suite: str
    model: str
    dtype: str
    seed: int
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)]
    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]

    @classmethod
    def of(cls, evaluation: Path, **values: Any) -> Self:
        """What is asked of the examples of an evaluation.

        Args:
            evaluation: Its folder.
            **values: What it does not say.

        Raises:
            EvaluationError: If there is none, or if the peer cannot do what is asked.
            ConfigError: If a budget is not accepted.
        """
        try:
            values |= json.loads((evaluation / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise EvaluationError(f"{evaluation} holds no evaluation; run one first") from None
        config = cls.parse(values)
        known = PEER_METHODS[config.peer]
        if unknown := set(config.methods) - set(known):
            raise EvaluationError(
                f"{config.peer} has no {', '.join(sorted(unknown))}; there are {', '.join(known)}"
            )
        for budget in config.budgets:
            _settings(budget)
        if config.suite in ENGINE_SUITES:
            raise EvaluationError(f"{config.suite} are the engine's alone: take another suite")
        if config.peer == "openvino" and "context-only" in config.scenarios:
            raise EvaluationError(
                "OpenVINO cannot compress a text apart from its question: leave --scenarios out"
            )
        if config.peer == "openvino" and config.suite == "given-answers":
            raise EvaluationError("OpenVINO does not tell likelihoods: take another suite")
        return config

    def settings(self, scenario: Scenario) -> list[Setting]:
        """What is measured in a scenario: the full cache, then every method at every budget."""
        asked = [(FULL, None), *product(self.methods, self.budgets)]
        return [Setting(scenario, *each, self.peer) for each in asked]


def examples_of(evaluation: Path) -> list[Example]:
    """The examples of an evaluation, from its folder."""
    with (evaluation / "examples.jsonl").open(encoding="utf-8") as lines:
        return [_example(json.loads(line)) for line in lines]


def _example(values: dict[str, Any]) -> Example:
    known: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    return Example(**known)


def num_entries(budget: Budget, num_tokens: int) -> int:
    """Entries per KV head that a budget allows a prompt, as the plugin counts them."""
    return min(num_tokens, budget_entries(num_tokens, _settings(budget)))


def _settings(budget: Budget) -> EvictionConfig:
    return EvictionConfig.parse({"method": "random", "budget": budget})


def example_job(example: Example) -> dict[str, Any]:
    """What a worker is told of an example."""
    return {
        "example": example.name,
        "prompt": example.prompt,
        "question": example.question,
        "max_tokens": example.max_tokens,
        "stop": example.stop,
        "target": example.target,
    }


def end_tokens(model: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens that end an answer: the tokenizer's and those of the generation settings."""
    from transformers import GenerationConfig

    ends = {tokenizer.eos_token_id}
    if (Path(model_folder(model)) / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(model_folder(model)).eos_token_id or ()
        ends |= {found} if isinstance(found, int) else set(found)
    return sorted(ends - {None})


def answer_all(
    config: PeerConfig,
    examples: Sequence[Example],
    done: Container[tuple[str, Setting]],
    ask: Callable[[Setting, list[Example]], Iterator[Reply]],
) -> Iterator[list[Prediction]]:
    """Has answered what is not done, with a progress bar on stderr.

    Args:
        config: What is asked.
        examples: The examples.
        done: Pairs of example and setting that are left out.
        ask: Has examples answered in a setting.

    Yields:
        One prediction at a time.
    """
    tokenizer = load_tokenizer(config.model)
    by_name = {example.name: example for example in examples}
    settings = [each for scenario in config.scenarios for each in config.settings(scenario)]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(settings) * len(examples))
        for setting in settings:
            missing = [each for each in examples if (each.name, setting) not in done]
            progress.update(bar, description=_title(setting), advance=len(examples) - len(missing))
            for reply in ask(setting, missing):
                yield [_prediction(by_name[reply["example"]], setting, reply, tokenizer)]
                progress.advance(bar)


def _prediction(
    example: Example, setting: Setting, reply: Reply, tokenizer: "PreTrainedTokenizerBase"
) -> Prediction:
    text = str(tokenizer.decode(reply["tokens"], skip_special_tokens=True))
    for stop in example.stop:
        text = text.split(stop)[0]
    return Prediction(
        example=example.name,
        scenario=setting.scenario,
        method=setting.method,
        budget=setting.budget,
        through=setting.through,
        text=text,
        num_tokens=len(reply["tokens"]),
        retained=reply["retained"],
        nll=reply.get("nll"),
        accuracy=reply.get("accuracy"),
    )


def _title(setting: Setting) -> str:
    budget = "" if setting.budget is None else f" {setting.budget}"
    return f"{setting.scenario}, {setting.method}{budget}"
