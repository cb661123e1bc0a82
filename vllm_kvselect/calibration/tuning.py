"""A probe tuned end to end: to what the model says of a text, not to a score of its entries."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from vllm_kvselect.calibration.gates import log_gates
from vllm_kvselect.calibration.normal_equations import Spread
from vllm_kvselect.calibration.repetition import divergence, repeated
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.teacher import features_of
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.kvzip import chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARES: Final = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Of the entries: one probe serves all budgets."""

KEPT_EVERY: Final = 10
"""Steps between two of which the state is kept: half a minute of the small model."""

_NUM_WARM_UP = 10
_SOFTNESS = (0.5, 0.15)
"""At the first step and at the last one: gradients reach far first, and gates close then."""

_OF_ADAM: Final = ("step", "exp_avg", "exp_avg_sq")
"""What PyTorch's Adam remembers of a parameter."""


def tuned(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    weights: torch.Tensor,
    spread: Spread,
    contexts: Sequence[list[int]],
    config: CalibrationConfig,
    done: Callable[[], None] = lambda: None,
    begun: Mapping[str, torch.Tensor] | None = None,
    keep: Callable[[dict[str, torch.Tensor]], None] = lambda state: None,
) -> torch.Tensor:
    """Tunes a probe by gradient so that the model repeats a text as it does with the full cache.

    Each step takes the next text and a part of it. The model repeats the part once for each of
    `SHARES`, every entry behind a soft gate of its score; all heads of all layers share a budget.
    The loss is how far what it says is from what it says with the full cache: the mean of the
    tokens' divergences and their root mean square, in equal parts. The mean alone lets a few tokens
    go altogether, as the digits of a number, where many others gain a little.

    What is returned is half way between the weights at the beginning and those at the end. Most of
    the gain is there, and what the repetition of these texts does not ask for is kept as well as
    it was.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        weights: To begin with, `[num_layers, num_features, num_kv_heads]`.
        spread: Of the features: weights are tuned in its units.
        contexts: Token ids of the texts.
        config: Steps, size of the parts, rate, seed.
        done: Called after each step.
        begun: What `keep` got last of a tuning that was stopped: this one goes on from there.
        keep: Called every `KEPT_EVERY` steps with all that later steps depend on.

    Raises:
        EvaluationError: If the model does not attend plainly, or its rotations are not known.
    """
    begun_with = spread.in_units(weights.double())
    in_units = begun_with.clone().requires_grad_()
    optimizer = torch.optim.Adam([in_units], lr=config.rate)
    generator = torch.Generator().manual_seed(config.seed)
    first = _take_up(begun, in_units, optimizer, generator) if begun and "step" in begun else 0
    for step in range(first, config.steps):
        context = contexts[step % len(contexts)]
        parts = list(chunks(tokenizer, context, config.part))
        part = parts[int(torch.randint(len(parts), (), generator=generator))]
        layers = capture(model, context)
        scores = torch.stack(
            [
                torch.bmm(weight.to(features.dtype).T.unsqueeze(1), features.mT).squeeze(1)
                for features, weight in zip(
                    features_of(layers), spread.of_features(in_units), strict=True
                )
            ]
        )
        with torch.no_grad():
            full = repeated(model, layers, context, part, torch.zeros_like(scores)[None])
        gates = _gates(scores, _softness(step / config.steps))
        loss = _loss(divergence(repeated(model, layers, context, part, gates), full[0]))
        (weights_of_layers,) = optimizer.param_groups
        weights_of_layers["lr"] = config.rate * _pace(step, config.steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done()
        if (step + 1) % KEPT_EVERY == 0:
            keep(_state(in_units, optimizer, generator))
    return spread.of_features((begun_with + in_units.detach()) / 2).to(weights.dtype)


def _state(
    in_units: torch.Tensor, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    of_adam = optimizer.state[in_units]
    state = {name: of_adam[name].clone() for name in _OF_ADAM}
    return {"in_units": in_units.detach().clone(), "generator": generator.get_state(), **state}


def _take_up(
    begun: Mapping[str, torch.Tensor],
    in_units: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    """Puts a state back, and says how many steps are behind it."""
    with torch.no_grad():
        in_units.copy_(begun["in_units"])
    of_adam = {name: begun[name] for name in _OF_ADAM}
    optimizer.load_state_dict(
        {"state": {0: of_adam}, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    generator.set_state(begun["generator"].cpu())
    return int(begun["step"])


def _gates(scores: torch.Tensor, softness: float) -> torch.Tensor:
    """`[len(SHARES), num_layers, num_kv_heads, num_tokens]`; the first tokens are never dropped."""
    num_first = EvictionConfig(method="layer-probe").num_first
    competing = scores[..., num_first:]
    gates = torch.stack([log_gates(competing, share, softness) for share in SHARES])
    return torch.cat((torch.zeros_like(gates[..., :num_first]), gates), dim=-1)


def _loss(divergences: torch.Tensor) -> torch.Tensor:
    """Of tokens, `[num_ways, num_tokens]`: their mean and root mean square, in equal parts."""
    root_mean_square = torch.linalg.vector_norm(divergences, dim=-1) / divergences.shape[-1] ** 0.5
    return (divergences.mean() + root_mean_square.mean()) / 2


def _pace(step: int, num_steps: int) -> float:
    """Factor of the rate: up at first, then down along a cosine."""
    return min(1.0, (step + 1) / _NUM_WARM_UP) * (1 + math.cos(math.pi * step / num_steps)) / 2


def _softness(progress: float) -> float:
    first, last = _SOFTNESS
    return first * (last / first) ** progress
