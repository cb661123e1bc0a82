"""What transformers answers on a cache with dropped entries: the other side of `models.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from papers.continuation import continue_prompt

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.retained import Prompt, retained_entries
from vllm_kvselect.planning.cuts import cuts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOLERANCE = 0.01
"""Nats by which two implementations in float32 may differ; dropping changes far more."""


@dataclass(frozen=True)
class Check:
    """A comparison with transformers.

    Attributes:
        retained: Largest difference of log-probabilities where transformers keeps the same entries.
        everything: The same where it keeps all: how much it matters what was dropped.
        reason: Why there is no comparison, or none that says anything.
    """

    retained: float = 0.0
    everything: float = 0.0
    reason: str = ""

    @property
    def is_shown(self) -> bool:
        """Whether the same entries give the same answer and others would not."""
        return not self.reason and self.retained < min(TOLERANCE, self.everything / 10)

    @property
    def is_wrong(self) -> bool:
        """Whether the same entries give another answer."""
        return not self.reason and self.retained >= TOLERANCE

    @property
    def cell(self) -> str:
        """Both numbers, for the table."""
        return "" if self.reason else f"{self.retained:.0e} ({self.everything:.2f})"


def check(
    folder: Path,
    prompt: Sequence[int],
    answer: dict[str, Any],
    whole: dict[str, Any],
    block_size: int,
    config: EvictionConfig,
) -> Check:
    """Compares an answer of an engine with what transformers makes of its tokens.

    Args:
        folder: Folder of the model.
        prompt: Token ids.
        answer: `token_ids` and `logprobs` of an answer after entries were dropped.
        whole: The same of an answer without dropping, on which both must agree before anything
            else can be compared.
        block_size: Tokens per block of the engine.
        config: Method and budget.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids, given = answer["token_ids"], answer["logprobs"][1:]
    try:
        undropped = logprobs_on_positions(model, prompt, whole["token_ids"], None)
        if config.method == "streaming-llm":
            positions = positions_of_streaming_llm(len(prompt), block_size, config)
            retained = logprobs_on_positions(model, prompt, token_ids, positions)
        else:
            retained = logprobs_on_choice(model, prompt, token_ids, block_size, config)
        everything = logprobs_on_positions(model, prompt, token_ids, None)
    except Exception as error:  # an EvaluationError, or one of the model's own code
        return Check(reason=" ".join(str(error).split()))
    apart = largest_difference(undropped, whole["logprobs"][1:])
    if apart >= TOLERANCE:
        return Check(reason=f"without dropping, vLLM and transformers differ by {apart:.2f}")
    return Check(largest_difference(retained, given), largest_difference(everything, given))


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns by how much two lists of log-probabilities differ at most."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@torch.no_grad()
def logprobs_on_positions(
    model: "PreTrainedModel",
    prompt: Sequence[int],
    answer: Sequence[int],
    positions: Sequence[int] | None,
) -> list[float]:
    """Log-probabilities of an answer, each layer with full attention keeping the same positions.

    Args:
        model: A causal language model.
        prompt: Token ids.
        answer: Token ids that follow it.
        positions: Of the prompt's entries that are kept for the answer's tokens; None keeps all.

    Returns:
        One log-probability for each token of the answer but the first, which the prefill gives.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(torch.tensor([prompt]), past_key_values=cache)
    for layer in cache.layers if positions is not None else ():
        # A layer without a cache of tokens keeps a state, and drops nothing.
        if not getattr(layer, "is_sliding", True):
            layer.keys, layer.values = layer.keys[:, :, positions], layer.values[:, :, positions]
    rows = [
        model(
            torch.tensor([[token]]),
            position_ids=torch.tensor([[len(prompt) + index]]),
            past_key_values=cache,
        ).logits[0]
        for index, token in enumerate(answer[:-1])
    ]
    return _logprobs(torch.cat(rows), answer)


def positions_of_streaming_llm(
    num_tokens: int, block_size: int, config: EvictionConfig
) -> list[int]:
    """The first tokens and the latest ones, as many as the retention plan says."""
    (cut,) = cuts(num_tokens, block_size, config)
    num_latest = num_tokens - cut.first_packed * block_size - config.num_first
    return [*range(config.num_first), *range(num_tokens - num_latest, num_tokens)]


def logprobs_on_choice(
    model: "PreTrainedModel",
    prompt: Sequence[int],
    answer: Sequence[int],
    block_size: int,
    config: EvictionConfig,
) -> list[float]:
    """The same for any method, chosen by the references from queries that transformers computes.

    Raises:
        EvaluationError: If a layer's attention is not plain.
    """
    layers = capture(model, list(prompt))
    retained = retained_entries(Prompt(layers, len(prompt), block_size), config)
    following = list(answer[:-1])
    continued = continue_prompt(model, layers, prompt, following, retained)
    return _logprobs(continued.logits, answer)


def _logprobs(logits: torch.Tensor, answer: Sequence[int]) -> list[float]:
    chosen = torch.tensor(answer[1:])[:, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist()
