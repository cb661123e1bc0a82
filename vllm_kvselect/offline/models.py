"""Models and tokenizers by transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.tiny_model import tiny_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(name: str, dtype: str, device: "torch.device | None" = None) -> "PreTrainedModel":
    """Loads a causal language model, whose weights need no gradients.

    Args:
        name: Folder or hub name; empty for the small model.
        dtype: Of weights and activations, such as `float32`; empty for `default_dtype()`.
        device: Where it runs; None for `default_device()`.

    Raises:
        EvaluationError: If transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from vllm_kvselect.machine import default_device, default_dtype

    logging.disable_progress_bar()
    folder = model_folder(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or default_dtype())
    except (OSError, ValueError) as error:
        raise _cannot_load(folder, error) from None
    loaded: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return loaded.to(device or default_device())  # type: ignore[arg-type]


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a model.

    Raises:
        EvaluationError: If transformers cannot load it.
    """
    from transformers import AutoTokenizer

    folder = model_folder(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _cannot_load(folder, error) from None
    return tokenizer


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text, and none of those that a model wants around it."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def chat(tokenizer: "PreTrainedTokenizerBase", message: str, system: str = "") -> str:
    """A user's message in the chat template, up to where the answer begins.

    The template has the BOS token, where the model wants one. An empty system prompt stands for the
    template's own.

    Raises:
        EvaluationError: If the model has no chat template.
    """
    if not tokenizer.chat_template:
        raise EvaluationError("the model has no chat template: choose an instruct model")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": message})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def model_folder(name: str) -> str:
    """The name itself, or the folder of the small model if it is empty."""
    return name or str(tiny_model())


def _cannot_load(folder: str, error: Exception) -> EvaluationError:
    reason = str(error).splitlines()[0]
    return EvaluationError(f"cannot load {Path(folder).name} with transformers: {reason}")
