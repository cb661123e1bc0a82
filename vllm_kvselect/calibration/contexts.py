"""Texts to calibrate on: several kinds, since what matters in code is not what matters in prose."""

from typing import TYPE_CHECKING

from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.offline.tasks import cases_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_contexts(
    tokenizer: "PreTrainedTokenizerBase", config: CalibrationConfig, are_left_out: bool = False
) -> list[list[int]]:
    """Token ids of the texts that a probe is fitted to, kinds in turn; or of those left out.

    Raises:
        EvaluationError: If texts and length do not fit.
    """
    num_texts = config.num_left_out if are_left_out else config.num_texts
    seed = config.seed + are_left_out
    by_kind = [
        [case.context for case in cases_of(tokenizer, kind, num_texts, config.length, seed)]
        for kind in config.texts
    ]
    return [context for turn in zip(*by_kind, strict=True) for context in turn]
