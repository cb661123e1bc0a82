"""Texts to calibrate on: several kinds, since what matters in code is not what matters in prose."""

from typing import TYPE_CHECKING

from vllm_kvselect.analysis.tasks import TASKS
from vllm_kvselect.analysis.texts import read_texts
from vllm_kvselect.calibration.settings import KINDS, CalibrationConfig

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
    by_kind = []
    for kind in config.texts:
        task, source = KINDS.get(kind, ("passage", kind))
        texts = [] if source is None else read_texts(source)
        cases = TASKS[task](tokenizer, texts, num_texts, config.length, seed)
        by_kind.append([case.context for case in cases])
    return [context for turn in zip(*by_kind, strict=True) for context in turn]
