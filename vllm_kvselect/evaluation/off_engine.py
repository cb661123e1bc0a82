"""Answers off the engine: transformers, on the entries that the package's own methods retain.

A prompt runs through the model once for all methods and budgets and, of a single question about a
text, for both scenarios.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import Progress

from vllm_kvselect.evaluation.examples import Example, refuse_without_questions
from vllm_kvselect.evaluation.metrics import METRICS, NEVER_FALL, READ_ALONG
from vllm_kvselect.evaluation.predictions import Prediction, Setting
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.answers import forced
from vllm_kvselect.offline.attention import keeps_states
from vllm_kvselect.offline.capture import Layer, capture
from vllm_kvselect.offline.continuations import Continuations
from vllm_kvselect.offline.kvzip import replayed
from vllm_kvselect.offline.models import load_model, load_tokenizer
from vllm_kvselect.offline.probes import probe_for
from vllm_kvselect.offline.remembered import remembering
from vllm_kvselect.offline.retained import Prompt, retained_entries
from vllm_kvselect.offline.tasks import Scenario

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS_AT_ONCE = 64
"""Answers that are generated side by side: bounds the memory of their logits and attention."""


def answer(
    config: EvaluationConfig, examples: Sequence[Example], done: Container[tuple[str, Setting]]
) -> Iterator[list[Prediction]]:
    """Answers every example in every setting, with a progress bar on stderr.

    Questions about one text follow each other. Pairs in `done` are left out.

    Yields:
        The predictions of one example in one scenario.

    Raises:
        EvaluationError: If the model cannot be loaded or does not attend plainly, or if the text
            of an example is not known apart from its question, which context-only needs.
        ConfigError: If a method needs a probe of the model, and there is none.
    """
    model = load_model(config.model, config.dtype)
    probe = probe_for(config.model, config.evictions())
    runner = _Runner(config, model, load_tokenizer(config.model), probe)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("examples", total=len(examples) * len(config.scenarios))
        for _, group in groupby(examples, key=lambda example: example.context):
            for predictions in runner.answer_group(list(group), done):
                yield predictions
                progress.advance(bar)


@dataclass(frozen=True)
class _Compressed:
    """A prompt that every setting has chosen from.

    Attributes:
        layers: Captured from the prompt, or from more that begins with it.
        retained: `[num_settings, num_layers, num_kv_heads, position]` bool. What follows the
            position reads these entries alone.
        token_ids: The prompt or the text, of which `retained` is a share.
    """

    layers: list[Layer]
    retained: torch.Tensor
    token_ids: Sequence[int]

    @cached_property
    def shares(self) -> list[float]:
        """Share of the entries that each setting retains."""
        compressed = self.position / len(self.token_ids)
        return [1 - (1 - each.double().mean().item()) * compressed for each in self.retained]

    @property
    def position(self) -> int:
        """Tokens whose entries were chosen from."""
        return self.retained.shape[-1]


@dataclass(frozen=True)
class _Runner:
    """Answers examples as one configuration asks for it."""

    config: EvaluationConfig
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    probe: torch.Tensor | None

    def answer_group(
        self, examples: list[Example], done: Container[tuple[str, Setting]]
    ) -> Iterator[list[Prediction]]:
        """Answers all questions about one text, in each scenario."""
        text: _Compressed | None = None  # context-only: one choice for all questions
        for example in examples:
            layers: list[Layer] = []
            for scenario in self.config.scenarios:
                settings = self.config.settings(scenario)
                rows = [i for i, each in enumerate(settings) if (example.name, each) not in done]
                if not rows:
                    yield []
                    continue
                if not layers and (text is None or scenario == "regular"):
                    layers = capture(self.model, list(example.prompt))
                if scenario == "regular":
                    compressed = self._compress(layers, example.prompt, len(example.prompt))
                else:
                    refuse_without_questions([example])
                    text = compressed = text or self._compress_text(layers, example.context)
                yield self._answer(example, scenario, compressed, rows)

    def _compress_text(self, layers: list[Layer], tokens: Sequence[int]) -> _Compressed:
        """Compresses a text as the engine does a context: up to its last block border.

        The rest of it reads what is retained, as the question does.
        """
        return self._compress(layers, tokens, len(tokens) - len(tokens) % self.config.block_size)

    def _compress(self, layers: list[Layer], tokens: Sequence[int], position: int) -> _Compressed:
        """Lets every setting choose from the tokens before a position, the full cache first."""
        evictions = self.config.evictions()
        prompt = Prompt(
            layers,
            position,
            self.config.block_size,
            kernels=remembering(),
            probe=self.probe,
            replayed=replayed(self.model, self.tokenizer, layers, tokens[:position], evictions),
        )
        chosen = [retained_entries(prompt, each) for each in evictions]
        return _Compressed(layers, torch.stack([_everything(layers, position), *chosen]), tokens)

    def _answer(
        self, example: Example, scenario: Scenario, compressed: _Compressed, rows: list[int]
    ) -> list[Prediction]:
        predictions = []
        settings = self.config.settings(scenario)
        # The prompt of a model with states runs again in every row: a batch saves nothing there.
        at_once = 1 if keeps_states(self.model) else ROWS_AT_ONCE
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            answers = self._continue(example, compressed, compressed.retained[some])
            for row, (token_ids, nll, accuracy) in zip(some, answers, strict=True):
                setting = settings[row]
                predictions.append(
                    Prediction(
                        example.name,
                        scenario,
                        setting.method,
                        setting.budget,
                        setting.through,
                        self._text(example, token_ids),
                        len(token_ids),
                        compressed.shares[row],
                        nll,
                        accuracy,
                    )
                )
        return predictions

    def _continue(
        self, example: Example, compressed: _Compressed, retained: torch.Tensor
    ) -> list[tuple[list[int], float | None, float | None]]:
        """Generated tokens, and negative log-likelihood and accuracy of the target, by row."""
        layers = compressed.layers
        prompt = compressed.token_ids[: compressed.position]
        continued = Continuations(self.model, layers, prompt, retained)
        following = example.prompt[compressed.position :]
        forced_ids = torch.tensor([following + example.target], device=retained.device)
        measures: list[tuple[float | None, float | None]] = [(None, None)] * len(retained)
        reads_along = example.metric == READ_ALONG
        first = None
        if not following and not reads_along:
            first = self._first_token(layers, example).expand(len(retained))
        if forced_ids.numel():
            num_logits = len(example.target) + bool(following)
            logits = continued.run(forced_ids.expand(len(retained), -1), num_logits)
            if len(example.target) > 1:
                measures = [forced(each, list(example.target)) for each in logits]
            if first is None:
                first = logits[:, 0].argmax(dim=-1)
            continued.rewind(len(following))
        if reads_along:
            return [([], *each) for each in measures]
        assert first is not None
        answers = self._generate(continued, first, example)
        return [(answer, *each) for answer, each in zip(answers, measures, strict=True)]

    def _first_token(self, layers: list[Layer], example: Example) -> torch.Tensor:
        """The token after a prompt: it comes from the full cache, whatever is dropped later."""
        *before, last = example.prompt
        everything = _everything(layers, len(before))
        continued = Continuations(self.model, layers, before, everything[None])
        return continued.run(torch.tensor([[last]], device=everything.device), 1)[0, -1].argmax()

    def _generate(
        self, continued: Continuations, first: torch.Tensor, example: Example
    ) -> list[list[int]]:
        """Greedy decoding; a row leaves the batch when its answer ends or cannot become better."""
        answers: list[list[int]] = [[] for _ in first]
        running, tokens = list(range(len(first))), first
        while True:
            for row, token in zip(running, tokens.tolist(), strict=True):
                answers[row].append(token)
            alive = [i for i, row in enumerate(running) if not self._ends(example, answers[row])]
            if not alive:
                return answers
            if len(alive) < len(running):
                continued.keep(torch.tensor(alive, device=tokens.device))
                running, tokens = [running[i] for i in alive], tokens[alive]
            tokens = continued.run(tokens[:, None], 1)[:, 0].argmax(dim=-1)

    def _ends(self, example: Example, answer: list[int]) -> bool:
        if len(answer) == example.max_tokens or answer[-1] in self._end_tokens:
            return True
        if not example.stop and example.metric not in NEVER_FALL:
            return False
        text = str(self.tokenizer.decode(answer, skip_special_tokens=True))
        if any(stop in text for stop in example.stop):
            return True
        if example.metric not in NEVER_FALL:
            return False
        return METRICS[example.metric](text, example.references, example.classes) == 1.0

    @property
    def _end_tokens(self) -> set[int]:
        """Tokens that end an answer: the tokenizer's and those of the generation settings."""
        settings = self.model.generation_config
        found = (settings and settings.eos_token_id) or ()
        ends = {found} if isinstance(found, int) else set(found)
        return ends | {self.tokenizer.eos_token_id}

    def _text(self, example: Example, answer: list[int]) -> str:
        text = str(self.tokenizer.decode(answer, skip_special_tokens=True))
        for stop in example.stop:
            text = text.split(stop)[0]
        return text


def _everything(layers: list[Layer], num_tokens: int) -> torch.Tensor:
    """All entries of the first tokens, `[num_layers, num_kv_heads, num_tokens]` bool."""
    key = layers[0].key
    return torch.ones(len(layers), len(key), num_tokens, dtype=torch.bool, device=key.device)
