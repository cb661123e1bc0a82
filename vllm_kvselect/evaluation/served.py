"""Answers of the served engine: vLLM over HTTP, every method and budget on one server.

A prompt is first answered with the full cache. Its blocks are in the prefix cache then, and all
other settings share them.
"""

import asyncio
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.progress import Progress

from vllm_kvselect.analysis.errors import EvaluationError
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation.endpoint import (
    PROMPTS_AT_ONCE,
    Endpoint,
    Needs,
    endpoint,
    full_cache,
    reason_of,
    request_settings,
)
from vllm_kvselect.evaluation.examples import Example, refuse_without_questions
from vllm_kvselect.evaluation.predictions import Prediction, Setting
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.retention import cuts

Asked = tuple[Setting, EvictionConfig]
"""A setting, and what a request sends for it."""


def answer(
    config: EvaluationConfig, examples: Sequence[Example], done: Container[tuple[str, Setting]]
) -> Iterator[list[Prediction]]:
    """Answers every example in every setting, with a progress bar on stderr.

    Args:
        config: Model or server, methods and budgets.
        examples: The questions.
        done: Pairs of example and setting that are left out.

    Yields:
        The predictions of one example. By then the server's metrics have confirmed that it dropped
        what it was asked to.

    Raises:
        EvaluationError: If the server cannot be started or used, refuses something, or did not drop
            what it was asked to.
    """
    asked = [
        (setting, eviction)
        for scenario in config.scenarios
        for setting, eviction in zip(
            config.settings(scenario), [full_cache(config), *config.evictions()], strict=True
        )
    ]
    missing = {
        example: [each for each in asked if (example.name, each[0]) not in done]
        for example in examples
    }
    pending = [example for example in examples if missing[example]]
    if not pending:
        return
    _refuse_single_tokens(pending)
    if "context-only" in config.scenarios:
        refuse_without_questions(pending)
    with (
        endpoint(config, _needs(config, pending)) as served,
        Progress(console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("examples", total=len(pending))
        for start in range(0, len(pending), PROMPTS_AT_ONCE):
            some = pending[start : start + PROMPTS_AT_ONCE]
            answered = asyncio.run(_answer_all(served, {each: missing[each] for each in some}))
            served.cuts.check()
            for predictions in answered:
                yield predictions
                progress.advance(bar)


def retained_share(num_prompt_tokens: int, block_size: int, eviction: EvictionConfig) -> float:
    """Entries retained of a prompt, or of its context, over all of its entries."""
    num_freed = cuts(num_prompt_tokens, block_size, eviction).num_freed(num_prompt_tokens)
    context = eviction.context if isinstance(eviction.context, int) else num_prompt_tokens
    return 1.0 - num_freed * block_size / context


def _refuse_single_tokens(examples: Sequence[Example]) -> None:
    tasks = sorted({example.task for example in examples if example.max_tokens == 1})
    if tasks:
        raise EvaluationError(
            f"answers of {', '.join(tasks)} have one token, which comes before anything is "
            "dropped: every method would look perfect; leave them out or give more --max-tokens"
        )


def _needs(config: EvaluationConfig, examples: Sequence[Example]) -> Needs:
    """Room for some prompts at once, each with what every setting retains of it."""
    longest = max(examples, key=lambda example: len(example.prompt) + example.max_tokens)
    num_tokens = len(longest.prompt)
    shares = [retained_share(num_tokens, config.block_size, each) for each in config.evictions()]
    answers = len(config.scenarios) * (len(shares) + 1) * (longest.max_tokens + config.block_size)
    held = int(num_tokens * (1.0 + len(config.scenarios) * sum(shares))) + answers
    return Needs(num_tokens + longest.max_tokens, PROMPTS_AT_ONCE * held)


async def _answer_all(
    served: Endpoint, missing: dict[Example, list[Asked]]
) -> list[list[Prediction]]:
    """Answers examples at the same time."""
    async with served.client() as http:
        runner = _Runner(served, http)
        return await asyncio.gather(*(runner.answer(*each) for each in missing.items()))


@dataclass(frozen=True)
class _Runner:
    """Asks a server."""

    served: Endpoint
    http: httpx.AsyncClient

    async def answer(self, example: Example, asked: list[Asked]) -> list[Prediction]:
        """Answers an example: with the full cache first, then in all other settings at once."""
        first, *others = asked
        return [
            await self._ask(example, *first),
            *await asyncio.gather(*(self._ask(example, *each) for each in others)),
        ]

    async def _ask(
        self, example: Example, setting: Setting, eviction: EvictionConfig
    ) -> Prediction:
        if setting.scenario == "context-only":
            eviction = eviction.model_copy(update={"context": len(example.context)})
        body = {
            "model": self.served.model,
            "prompt": example.prompt,
            "max_tokens": example.max_tokens,
            "temperature": 0.0,
            "stop": example.stop,
            "vllm_xargs": request_settings(eviction),
        }
        try:
            response = await self.http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise EvaluationError(
                f"{self.served.url} does not answer any more ({error!r}); read its log"
            ) from None
        if response.is_error:
            raise EvaluationError(
                f"{self.served.url} does not answer {example.name} with {eviction.method}: "
                f"{reason_of(response)}"
            )
        answered = response.json()
        num_prompt_tokens = len(example.prompt)
        num_tokens = answered["usage"]["completion_tokens"]
        self.served.cuts.note(num_prompt_tokens, num_tokens, eviction)
        return Prediction(
            example.name,
            setting.scenario,
            setting.method,
            setting.budget,
            setting.through,
            answered["choices"][0]["text"],
            num_tokens,
            retained_share(num_prompt_tokens, self.served.cuts.block_size, eviction),
        )
