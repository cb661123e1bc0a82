"""Texts to calibrate on: several kinds, since what matters in code is not what matters in prose."""

from typing import TYPE_CHECKING

from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.offline.tasks import cases_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def contexts_to_fit(
    tokenizer: "PreTrainedTokenizerBase", config: CalibrationConfig
) -> list[list[int]]:
    """Token ids of the texts that a probe is fitted to, the kinds in turn.

    Args:
        tokenizer: The model's tokenizer.
        config: Kinds, number and length.

    Raises:
        EvaluationError: If texts and length do not fit.
    """
    return _contexts(tokenizer, config, config.num_texts, config.seed)


def contexts_left_out(
    tokenizer: "PreTrainedTokenizerBase", config: CalibrationConfig
) -> list[list[int]]:
    """Likewise, of other texts: by them a fit is judged."""
    return _contexts(tokenizer, config, config.num_left_out, config.seed + 1)


def _contexts(
    tokenizer: "PreTrainedTokenizerBase", config: CalibrationConfig, num_texts: int, seed: int
) -> list[list[int]]:
    by_kind = [
        [case.context for case in cases_of(tokenizer, kind, num_texts, config.length, seed)]
        for kind in config.texts
    ]
    return [context for turn in zip(*by_kind, strict=True) for context in turn]
