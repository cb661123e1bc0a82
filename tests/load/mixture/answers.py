"""What a client receives, and how two answers to one request differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.load.mixture.requests import Request

if TYPE_CHECKING:
    from vllm import RequestOutput


@dataclass
class Answer:
    """What a client received, of each sample in the order of their indices.

    Attributes:
        token_ids: Token ids by sample.
        texts: Text by sample.
        logprobs: `[token, log-probability]` pairs by token by sample, where they were asked for.
        prompt_logprobs: The same of the prompt.
        reasons: Finish reason and stop reason by sample; missing until it is finished.
        num_cached_tokens: Prompt tokens from the prefix cache.
    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    prompt_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    reasons: dict[int, tuple[str | None, Any]] = field(default_factory=dict)
    num_cached_tokens: int = 0

    def add(self, output: "RequestOutput") -> None:
        """Adds a part of the answer, or all of it."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens or 0)
        if output.prompt_logprobs:
            self.prompt_logprobs += _pairs(output.prompt_logprobs)
        for sample in output.outputs:
            index = sample.index
            self.token_ids.setdefault(index, []).extend(sample.token_ids)
            self.texts[index] = self.texts.get(index, "") + sample.text
            self.logprobs.setdefault(index, []).extend(_pairs(sample.logprobs or ()))
            if sample.finish_reason is not None:
                self.reasons[index] = (sample.finish_reason, sample.stop_reason)


def assert_as_alone(
    requests: Sequence[Request], expected: Mapping[str, Answer], answers: Sequence[Answer]
) -> None:
    """Compares each answer with the one that the request is given alone, by `Request.key`."""
    for request, answer in zip(requests, answers, strict=True):
        found = difference(request, expected[request.key], answer)
        assert found is None, (request.kind, request.sampling, len(request.prompt), found)


def difference(request: Request, expected: Answer, answer: Answer) -> str | None:
    """Says how an answer differs from the one given alone; None if it does not.

    Whoever left must have received the beginning of it. Log-probabilities may differ by the
    rounding of float32, whose sums depend on the shape of the batch.
    """
    if len(expected.reasons) != request.sampling.get("n", 1):
        return f"alone, {len(expected.reasons)} samples are finished"
    if any(reason not in ("stop", "length") for reason, _ in expected.reasons.values()):
        return f"alone, it ends with {expected.reasons}"
    for index, ids in expected.token_ids.items():
        received = answer.token_ids.get(index, [])
        if request.leaves_after is not None and index not in answer.reasons:
            ids = ids[: len(received)]
        if received != ids:
            return f"sample {index}: {received} instead of {ids}"
        if not _close(answer.logprobs.get(index, []), expected.logprobs[index][: len(ids)]):
            return f"log-probabilities of sample {index}"
        if index in answer.reasons and (
            answer.reasons[index] != expected.reasons[index]
            or answer.texts[index] != expected.texts[index]
        ):
            return f"sample {index}: {answer.texts[index]!r} {answer.reasons[index]}"
        if index not in answer.reasons and request.leaves_after is None:
            return f"sample {index} is not finished"
    if answer.prompt_logprobs and not _close(answer.prompt_logprobs, expected.prompt_logprobs):
        return "log-probabilities of the prompt"
    if expected.prompt_logprobs and not answer.prompt_logprobs and answer.token_ids:
        return "no log-probabilities of the prompt"
    return None


def _pairs(positions: Iterable[Any]) -> list[list[tuple[int, float]]]:
    return [
        sorted((token, entry.logprob) for token, entry in (position or {}).items())
        for position in positions
    ]


def _close(found: list[Any], expected: list[Any]) -> bool:
    if [[token for token, _ in at] for at in found] != [[t for t, _ in at] for at in expected]:
        return False
    return all(
        abs(a - b) < 1e-3
        for at, wanted in zip(found, expected, strict=True)
        for (_, a), (_, b) in zip(at, wanted, strict=True)
    )
