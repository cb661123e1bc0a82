"""The walk that every analysis takes: texts, scenarios, methods and budgets on one model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from papers.continuation import Continuation, continue_prompt
from papers.quantities import (
    Metric,
    distance,
    following_attention,
    head_outputs,
    retained_attention,
)
from papers.settings import AnalysisConfig
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.capture import Layer, capture
from vllm_kvselect.offline.kvzip import replayed
from vllm_kvselect.offline.models import load_model, load_tokenizer
from vllm_kvselect.offline.probes import probe_for
from vllm_kvselect.offline.remembered import remembering
from vllm_kvselect.offline.retained import Prompt
from vllm_kvselect.offline.tasks import TASKS, Case, Scenario, spread
from vllm_kvselect.offline.texts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Setting(NamedTuple):
    """What a number belongs to."""

    scenario: Scenario
    method: str
    budget: int | float


@dataclass(frozen=True)
class Sample:
    """One text in one scenario.

    Attributes:
        model: The model.
        case: Text, question and answer.
        scenario: What of it the prompt holds.
        layers: Captured from the prompt and from what follows it.
        prompt: What methods choose from.
    """

    model: "PreTrainedModel"
    case: Case
    scenario: Scenario
    layers: list[Layer]
    prompt: Prompt

    @cached_property
    def attention(self) -> list[torch.Tensor]:
        """`A` of each layer, `[num_heads, num_following, num_tokens]`."""
        return [following_attention(each, self.prompt.num_tokens) for each in self.layers]

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        """Each head's output with the full cache, `[num_heads, num_following, hidden_size]`."""
        return [
            head_outputs(layer, weights)
            for layer, weights in zip(self.layers, self.attention, strict=True)
        ]

    @cached_property
    def full(self) -> Continuation:
        """What the model makes of the following tokens with the full cache."""
        layer = self.layers[0]
        everything = torch.ones(
            len(self.layers), layer.key.shape[0], self.prompt.num_tokens, dtype=torch.bool
        )
        return self.continued(everything.to(layer.key.device))

    def head_distances(self, retained: torch.Tensor, metric: Metric = "l1") -> torch.Tensor:
        """How far each head's output moves when its layer alone evicts.

        Args:
            retained: `[num_layers, num_kv_heads, num_prompt_tokens]` bool.
            metric: Distance to the full cache's output.

        Returns:
            Mean over the following tokens, `[num_layers, num_heads]`.
        """
        layers = zip(self.layers, self.attention, self.outputs, retained, strict=True)
        return torch.stack(
            [
                distance(full, head_outputs(layer, retained_attention(weights, kept)), metric).mean(
                    dim=-1
                )
                for layer, weights, full, kept in layers
            ]
        )

    def continued(self, retained: torch.Tensor) -> Continuation:
        """What the model makes of the following tokens on the retained entries of all layers."""
        num_tokens = self.prompt.num_tokens
        whole = whole_of(self.case)
        compressed, following = whole[:num_tokens], whole[num_tokens:]
        return continue_prompt(self.model, self.layers, compressed, following, retained)


def whole_of(case: Case) -> list[int]:
    """Text, question and answer."""
    return case.context + case.question + case.answer


def compressed_of(case: Case, scenario: Scenario) -> list[int]:
    """The prompt that eviction sees in a scenario; the rest is forced, token by token."""
    return case.context + case.question if scenario == "regular" else case.context


class Study:
    """A loaded model and the samples of a configuration.

    Attributes:
        config: The configuration.
        model: The model.
        tokenizer: Its tokenizer.
    """

    def __init__(self, config: AnalysisConfig) -> None:
        self.config = config
        # Not every quantity is computed where the model is.
        self.model = load_model(config.model, config.dtype, torch.device("cpu"))
        self.tokenizer = load_tokenizer(config.model)
        self._probe = probe_for(config.model, config.evictions())

    @property
    def num_kv_heads(self) -> int:
        """KV heads per layer; models that do not say have as many as query heads."""
        shape = self.model.config.get_text_config()
        return int(getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads)

    def walk(
        self, evictions: Sequence[EvictionConfig] | None = None
    ) -> Iterator[tuple[Setting, EvictionConfig, Sample]]:
        """Visits every text, scenario and setting, with a progress bar on stderr.

        Args:
            evictions: The settings; None for every method at every budget.

        Yields:
            What the numbers to come belong to, its settings, and the sample.
        """
        chosen = self.config.evictions() if evictions is None else evictions
        cases = spread(
            TASKS[self.config.task],
            self.tokenizer,
            read_texts(self.config.texts),
            self.config.num_texts,
            self.config.length,
            self.config.seed,
        )
        with Progress(console=Console(stderr=True)) as progress:
            steps = len(cases) * len(self.config.scenarios) * len(chosen)
            bar = progress.add_task(self.config.analysis, total=steps)
            for case in cases:
                for sample in self._samples(case):
                    for eviction in chosen:
                        setting = Setting(sample.scenario, eviction.method, eviction.budget)
                        yield setting, eviction, sample
                        progress.advance(bar)

    def _samples(self, case: Case) -> Iterator[Sample]:
        """The model runs once per text: the scenarios cut the same tokens at different places."""
        layers = capture(self.model, whole_of(case))
        chosen_from = layers
        if self.config.what_if == "equal-norms":
            chosen_from = [layer._replace(value=torch.ones_like(layer.value)) for layer in layers]
        for scenario in self.config.scenarios:
            compressed = compressed_of(case, scenario)
            prompt = Prompt(
                chosen_from,
                len(compressed),
                self.config.block_size,
                remembering(),
                self._probe,
                replayed(self.model, self.tokenizer, layers, compressed, self.config.evictions()),
            )
            yield Sample(self.model, case, scenario, layers, prompt)
