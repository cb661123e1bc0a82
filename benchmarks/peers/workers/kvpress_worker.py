"""Answers through kvpress, in its environment: see `kvpress.py`."""

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import kvpress  # noqa: F401 - lets transformers' attention leave out entries of a head
import torch
from peers.lines import serve
from peers.methods import make_press
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from vllm_kvselect.offline.answers import forced

Job = dict[str, Any]


@dataclass
class Compressed:
    """A prompt's cache after the press.

    Attributes:
        cache: The cache; what answers add to it is taken away again.
        lengths: Its length in every layer.
        logits: `[vocabulary]`, after the prompt's last token.
        num_tokens: Length of the prompt.
        retained: Share of the entries that are retained.
    """

    cache: DynamicCache
    lengths: list[int]
    logits: torch.Tensor
    num_tokens: int
    retained: float


class Answerer:
    """A model and its tokenizer.

    Args:
        folder: The model.
        dtype: Of weights and activations.
    """

    def __init__(self, folder: str, dtype: str) -> None:
        # Presses with a budget for each head need sdpa.
        options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._folder = folder
        self._turn = self._turn_prefix()
        self._plain = tempfile.TemporaryDirectory()
        plain = AutoTokenizer.from_pretrained(folder)
        plain.chat_template = None
        plain.save_pretrained(self._plain.name)

    def compress(self, token_ids: list[int], press: str, ratio: float) -> Compressed:
        """Runs a prompt through the model, under a press unless nothing is to be dropped."""
        # KVzip takes the beginning of a chat for granted, and never retains as many tokens, unless
        # the tokenizer that it loads from here knows no chats.
        in_chat = bool(self._turn) and token_ids[: len(self._turn)] == self._turn
        self.model.config.name_or_path = self._folder if in_chat else self._plain.name
        cache = DynamicCache()
        with make_press(press, ratio)(self.model) if ratio > 0 else nullcontext():
            output = self.model(
                input_ids=torch.tensor([token_ids]), past_key_values=cache, logits_to_keep=1
            )
        lengths = [layer.keys.shape[2] for layer in cache.layers]
        num_tokens = len(token_ids)
        retained = self._num_retained(cache) / (len(lengths) * num_tokens)
        return Compressed(cache, lengths, output.logits[0, -1], num_tokens, retained)

    def follow(self, compressed: Compressed, token_ids: list[int], start: int) -> torch.Tensor:
        """Logits `[num_tokens, vocabulary]` of tokens at the positions from `start` on."""
        positions = torch.arange(start, start + len(token_ids))[None]
        output = self.model(
            input_ids=torch.tensor([token_ids]),
            past_key_values=compressed.cache,
            position_ids=positions,
        )
        return output.logits[0]

    def generate(
        self, compressed: Compressed, question: list[int], example: Job, ends: list[int]
    ) -> list[int]:
        """Decodes greedily, from the question on if one follows the prompt."""
        start = compressed.num_tokens
        logits = self.follow(compressed, question, start)[-1] if question else compressed.logits
        answer: list[int] = []
        while True:
            answer.append(int(logits.argmax()))
            if len(answer) == example["max_tokens"] or answer[-1] in ends:
                return answer
            text = self.tokenizer.decode(answer) if example["stop"] else ""
            if any(stop in text for stop in example["stop"]):
                return answer
            position = start + len(question) + len(answer) - 1
            logits = self.follow(compressed, answer[-1:], position)[-1]

    def _turn_prefix(self) -> list[int]:
        """Tokens that a chat begins with; none if the tokenizer knows no chats."""
        if not self.tokenizer.chat_template:
            return []
        mark = "what is asked"
        message = [{"role": "user", "content": mark}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False)
        return self.tokenizer.encode(text.split(mark)[0], add_special_tokens=False)

    def _num_retained(self, cache: DynamicCache) -> float:
        """Entries of all layers, averaged over KV heads."""
        total = 0.0
        for layer, held in zip(self.model.model.layers, cache.layers, strict=True):
            masked = getattr(layer.self_attn, "masked_key_indices", None)
            dropped = len(masked[0]) / held.keys.shape[1] if masked is not None else 0
            total += held.keys.shape[2] - dropped
        return total


@cache
def loaded(folder: str, dtype: str) -> Answerer:
    """The model, loaded once."""
    return Answerer(folder, dtype)


@torch.no_grad()
def answers(job: Job) -> Iterator[dict[str, Any]]:
    """Answers the examples of a job; a text that several ask about is compressed once."""
    answerer = loaded(job["model"], job["dtype"])
    last: tuple[list[int], float] | None = None
    for example in job["examples"]:
        question = [] if job["scenario"] == "regular" else example["question"]
        token_ids = example["prompt"][: len(example["prompt"]) - len(question)]
        if last != (token_ids, example["ratio"]):
            torch.manual_seed(job["seed"])
            compressed = answerer.compress(token_ids, job["press"], example["ratio"])
            last = (token_ids, example["ratio"])
        yield {
            "example": example["example"],
            "tokens": answerer.generate(compressed, question, example, job["end_tokens"]),
            "retained": compressed.retained,
            **_forced(answerer, compressed, question, example["target"]),
        }


def _forced(
    answerer: Answerer, compressed: Compressed, question: list[int], target: list[int]
) -> dict[str, float]:
    """Quality of the right answer; of one without a second token there is none."""
    rewind(compressed)
    if len(target) < 2:
        return {}
    logits = answerer.follow(compressed, question + target, compressed.num_tokens)
    rewind(compressed)
    nll, accuracy = forced(logits, target)
    return {"nll": nll, "accuracy": accuracy}


def rewind(compressed: Compressed) -> None:
    """Takes away what was added to the cache."""
    for layer, length in zip(compressed.cache.layers, compressed.lengths, strict=True):
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


if __name__ == "__main__":
    serve(answers)
