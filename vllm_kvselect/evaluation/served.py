"""Answers of the served engine: vLLM over HTTP, every method and budget on one server.

A prompt is first answered with the full cache. Its blocks are in the prefix cache then, and all
other settings share them.
"""

import asyncio
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation.endpoint import (
    ANSWER_KEY,
    GIVEN_ANSWERS,
    PROMPTS_AT_ONCE,
    Endpoint,
    Needs,
    endpoint,
    full_cache,
    reason_of,
    request_settings,
)
from vllm_kvselect.evaluation.examples import Example, TokenIds, refuse_without_questions
from vllm_kvselect.evaluation.metrics import READ_ALONG
from vllm_kvselect.evaluation.predictions import Prediction, Setting
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.planning.cuts import cuts

OWN_TEMPERATURE = 0.7
"""Of the full cache's own answers that are read along: greedy ones go round in circles."""

Asked = tuple[Setting, EvictionConfig]
"""A setting, and what a request sends for it."""


def answer(
    config: EvaluationConfig, examples: Sequence[Example], done: Container[tuple[str, Setting]]
) -> Iterator[list[Prediction]]:
    """Answers every example in every setting, with a progress bar on stderr.

    Pairs in `done` are left out.

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
            asking = _answer_all(served, full_cache(config), {each: missing[each] for each in some})
            answered = asyncio.run(asking)
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
    """What some prompts at once need, each with what every setting retains of it."""
    longest = max(examples, key=lambda example: len(example.prompt) + example.max_tokens)
    num_tokens = len(longest.prompt)
    evictions = config.evictions()
    shares = [retained_share(num_tokens, config.block_size, each) for each in evictions]
    answers = [longest.max_tokens, *(_held(longest.max_tokens, each) for each in evictions)]
    own = len(config.scenarios) * (sum(answers) + len(answers) * config.block_size)
    held = int(num_tokens * (1.0 + len(config.scenarios) * sum(shares))) + own
    reads_along = any(example.metric == READ_ALONG for example in examples)
    return Needs(num_tokens + longest.max_tokens, PROMPTS_AT_ONCE * held, reads_along)


def _held(max_tokens: int, eviction: EvictionConfig) -> int:
    """Tokens that an answer holds at most: rounds bring it back to its decode budget."""
    if not eviction.decode_budget:
        return max_tokens
    return min(max_tokens, eviction.decode_budget + 2 * eviction.decode_interval)


async def _answer_all(
    served: Endpoint, full: EvictionConfig, missing: dict[Example, list[Asked]]
) -> list[list[Prediction]]:
    """Answers examples at the same time."""
    async with served.client() as http:
        runner = _Runner(served, http, full)
        return await asyncio.gather(*(runner.answer(*each) for each in missing.items()))


@dataclass(frozen=True)
class _Runner:
    """Asks a server."""

    served: Endpoint
    http: httpx.AsyncClient
    full: EvictionConfig

    async def answer(self, example: Example, asked: list[Asked]) -> list[Prediction]:
        """Answers an example: with the full cache first, then in all other settings at once."""
        ask = self._ask
        if example.metric == READ_ALONG:
            given = example.target or await self._own_answer(example)
            ask = partial(self._read_along, given=given)
        first, *others = asked
        return [
            await ask(example, *first),
            *await asyncio.gather(*(ask(example, *each) for each in others)),
        ]

    async def _ask(
        self, example: Example, setting: Setting, eviction: EvictionConfig
    ) -> Prediction:
        eviction = _in_scenario(example, setting, eviction)
        body = {"max_tokens": example.max_tokens, "stop": example.stop}
        body |= {"temperature": example.temperature, "seed": example.seed}
        found = await self._post(example, eviction, body)
        return self._prediction(example, setting, eviction, found["text"], found["num_tokens"])

    async def _read_along(
        self, example: Example, setting: Setting, eviction: EvictionConfig, given: TokenIds
    ) -> Prediction:
        """Lets the server generate a given answer, and takes the likelihood of its tokens."""
        eviction = _in_scenario(example, setting, eviction)
        body = {"max_tokens": len(given), "logprobs": 1, "ignore_eos": True}
        found = await self._post(example, eviction, body, {ANSWER_KEY: given})
        if tuple(found.get("token_ids", ())) != given:
            raise EvaluationError(
                f"{self.served.url} does not give the answers that it is given; start it with "
                f"--logits-processors {GIVEN_ANSWERS}, or leave --url out"
            )
        own = found["logprobs"]["token_logprobs"][example.unmeasured :]
        best = found["logprobs"]["top_logprobs"][example.unmeasured :]
        likeliest = [mine >= max(top.values()) for mine, top in zip(own, best, strict=True)]
        measures = (-fmean(own), fmean(likeliest)) if own else ()
        return self._prediction(example, setting, eviction, "", 0, *measures)

    async def _own_answer(self, example: Example) -> TokenIds:
        """The answer that the full cache gives, sampled, and the same every time."""
        body = {"max_tokens": example.max_tokens, "temperature": OWN_TEMPERATURE, "seed": 0}
        found = await self._post(example, self.full, body | {"ignore_eos": True})
        return tuple(found["token_ids"])

    async def _post(
        self,
        example: Example,
        eviction: EvictionConfig,
        body: dict[str, Any],
        further: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Sends a request and takes note of it."""
        body = {
            "model": self.served.model,
            "prompt": example.prompt,
            "temperature": 0.0,
            "return_token_ids": True,
            "vllm_xargs": request_settings(eviction) | (further or {}),
            **body,
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
        num_tokens = answered["usage"]["completion_tokens"]
        self.served.cuts.note(len(example.prompt), num_tokens, eviction)
        return {**answered["choices"][0], "num_tokens": num_tokens}

    def _prediction(
        self, example: Example, setting: Setting, eviction: EvictionConfig, *answer: Any
    ) -> Prediction:
        text, num_tokens, *measures = answer
        block_size = self.served.cuts.block_size
        retained = retained_share(len(example.prompt), block_size, eviction)
        place = (example.name, setting.scenario, setting.method, setting.budget, setting.through)
        return Prediction(*place, text, num_tokens, retained, *measures)


def _in_scenario(example: Example, setting: Setting, eviction: EvictionConfig) -> EvictionConfig:
    if setting.scenario == "context-only":
        return eviction.model_copy(update={"context": len(example.context)})
    return eviction
