"""What a chat template puts in front of a user's turn."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_kvselect.config import ConfigError

_TEXTS = ("first question", "an answer", "second question")


def turn_start(model_config: ModelConfig) -> tuple[int, ...]:
    """Token ids with which users' turns begin, read from the model's chat template.

    Args:
        model_config: vLLM's configuration of the model.

    Raises:
        ConfigError: If there is no template, or it puts nothing in front of a turn.
    """
    tokenizer: Any = cached_tokenizer_from_config(model_config)
    try:
        start = _start_of_turns(tokenizer)
    except Exception as error:  # whatever a template raises
        raise ConfigError(_refusal(f"its chat template cannot be rendered: {error}")) from None
    token_ids: Sequence[int] = tokenizer.encode(start, add_special_tokens=False)
    if not token_ids:
        raise ConfigError(_refusal("its chat template puts nothing in front of a user's turn"))
    return tuple(token_ids)


def _start_of_turns(tokenizer: Any) -> str:
    """The text that stands in front of the first question and of the second one."""
    first, answer, second = _TEXTS
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, _TEXTS, strict=True)]
    rendered = str(tokenizer.apply_chat_template(chat, tokenize=False))
    before = rendered.partition(first)[0]
    between = rendered.partition(answer)[2].partition(second)[0]
    same = takewhile(
        lambda pair: pair[0] == pair[1], zip(before[::-1], between[::-1], strict=False)
    )
    start = "".join(letter for letter, _ in same)[::-1]
    return start.rstrip()  # white space may become one token with what follows


def _refusal(reason: str) -> str:
    return (
        f"context = 'chat' cannot be used with this model: {reason}; give the token ids with which "
        "a user's turn begins as turn_start, or mark contexts by their number of tokens"
    )
