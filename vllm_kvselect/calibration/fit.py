"""A probe fitted to its teacher, text by text."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from vllm_kvselect.calibration.contexts import contexts_left_out, contexts_to_fit
from vllm_kvselect.calibration.normal_equations import NormalEquations
from vllm_kvselect.calibration.quality import Agreement
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.teacher import samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Fit(NamedTuple):
    """A fitted probe.

    Attributes:
        weights: `[num_layers, num_features, num_kv_heads]` float32.
        agreement: With its teacher, on the texts that were left out.
        num_tokens: Tokens that it was fitted to.
        num_tokens_left_out: Tokens of the texts that were left out.
    """

    weights: torch.Tensor
    agreement: Agreement
    num_tokens: int
    num_tokens_left_out: int


def fit(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", config: CalibrationConfig
) -> Fit:
    """Fits a probe of every layer, with a progress bar on stderr.

    One text is alive at a time. What is kept of it are sums: for every KV head as many as the
    square of its number of features, in float64.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        config: Texts and ridge.

    Raises:
        EvaluationError: If texts and length do not fit, or the model does not attend plainly.
    """
    fitted = contexts_to_fit(tokenizer, config)
    left_out = contexts_left_out(tokenizer, config)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("texts", total=len(fitted) + len(left_out))
        equations: list[NormalEquations] = []
        for context in fitted:
            for index, (features, targets) in enumerate(samples(model, tokenizer, context, config)):
                if index == len(equations):
                    num_heads, _, num_features = features.shape
                    equations.append(NormalEquations(num_heads, num_features, features.device))
                equations[index].add(features, targets)
            progress.advance(bar)

        weights = torch.stack([each.solve(config.ridge) for each in equations]).float()
        agreement = Agreement(len(weights))
        for context in left_out:
            predicted, expected = [], []
            layers = samples(model, tokenizer, context, config)
            for of_layer, (features, targets) in zip(weights, layers, strict=True):
                by_head = of_layer.to(features.dtype).T.unsqueeze(2)
                predicted.append(torch.bmm(features, by_head).squeeze(2))
                expected.append(targets)
            agreement.add(predicted, expected)
            progress.advance(bar)
    return Fit(weights, agreement, sum(map(len, fitted)), sum(map(len, left_out)))
