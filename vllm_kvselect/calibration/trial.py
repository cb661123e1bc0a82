"""How long a calibration takes and how much memory: each of its parts is tried on one text."""

import resource
import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_kvselect.calibration.fit import fit
from vllm_kvselect.calibration.quality import divergences
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.tuning import tuned

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Trial(NamedTuple):
    """What was measured.

    Attributes:
        fit: Seconds for a text that is fitted to.
        tune: Seconds for a step of the tuning.
        judge: Seconds for a text that is left out.
        memory: Bytes at the peak, the model among them: of the GPU where there is one, else of
            this process.
    """

    fit: float
    tune: float
    judge: float
    memory: int

    def said(self, texts: int, steps: int, left_out: int) -> str:
        """What so many texts to fit to, steps and texts to judge by will take, for people."""
        seconds = self.fit * texts + self.tune * steps + self.judge * left_out
        return (
            f"takes about {max(1, round(seconds / 60))} min and {self.memory / 1e9:.1f} GB, by a "
            "trial of one text; when stopped, the same command goes on"
        )


def tried(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    context: list[int],
    config: CalibrationConfig,
) -> Trial:
    """Fits to one text, tunes by one step and judges the result by the same text.

    Raises:
        EvaluationError: If the model does not attend plainly, or its rotations are not known.
    """
    once = config.model_copy(update={"steps": min(1, config.steps)})
    times = [time.perf_counter()]
    weights, spread = fit(model, tokenizer, [context], once)
    probes = [weights.cpu()]  # which waits for the device
    times.append(time.perf_counter())
    if once.steps:
        probes += [tuned(model, tokenizer, weights, spread, [context], once).cpu()]
    times.append(time.perf_counter())
    divergences(model, tokenizer, context, probes, once.part)
    times.append(time.perf_counter())
    fit_for, tune_for, judge_for = (after - before for before, after in pairwise(times))
    return Trial(fit_for, tune_for, judge_for, _peak(model.device))


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
