"""From a configuration to a probe in a file."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import Progress

from vllm_kvselect import __version__
from vllm_kvselect.calibration.checkpoint import Checkpoint
from vllm_kvselect.calibration.fit import fit
from vllm_kvselect.calibration.normal_equations import Spread
from vllm_kvselect.calibration.quality import BUDGETS, divergences
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.trial import tried
from vllm_kvselect.calibration.tuning import tuned
from vllm_kvselect.machine import dtype_name
from vllm_kvselect.offline.attention import attending_layers
from vllm_kvselect.offline.models import load_model, load_tokenizer, model_folder
from vllm_kvselect.offline.tasks import cases_of
from vllm_kvselect.probes.file import ModelFacts, Probe, ProbeFacts, QualityFacts, make_place
from vllm_kvselect.probes.fingerprint import fingerprint
from vllm_kvselect.probes.places import default_path
from vllm_kvselect.tiny_model import NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def calibrated(config: CalibrationConfig) -> tuple[Path, ProbeFacts]:
    """Fits a probe, tunes it if steps are asked for, and writes it.

    On stderr it says what that will take, and shows how far it is. It may be stopped: the same
    configuration goes on after the fit, or after the steps that were kept last.

    Raises:
        EvaluationError: If the model cannot be loaded or calibrated, or if the texts do not fit.
        ConfigError: If its weights are not kept as safetensors, or the file cannot be written.
    """
    if config.out is not None:
        make_place(config.out)
    model, tokenizer = load_model(config.model, config.dtype), load_tokenizer(config.model)
    of_model = model_facts(model, config.model)
    settings = {
        **config.model_dump(mode="json", exclude={"model", "out"}),
        "dtype": dtype_name(model.dtype),
        "texts": [Path(each).name for each in config.texts],  # a folder's place is private
    }
    path = config.out or default_path(of_model.name, of_model.fingerprint)
    to_fit = read_contexts(tokenizer, config)
    left_out = read_contexts(tokenizer, config, are_left_out=True)
    decides = (__version__, of_model.model_dump(), settings, to_fit)
    checkpoint = Checkpoint.beside(path, *decides)
    begun = checkpoint.read()
    totals = {"fit": len(to_fit), "tune": config.steps, "judge": len(left_out)}
    before = {
        "fit": len(to_fit) if begun else 0,
        "tune": int(begun["step"]) if "step" in begun else 0,
        "judge": 0,
    }
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    trial = tried(model, tokenizer, to_fit[0], config)
    console.print(trial.said(*(total - before[part] for part, total in totals.items())))
    with Progress(console=console) as progress:
        bars = {
            part: progress.add_task(part, total=total, visible=total > 0, completed=before[part])
            for part, total in totals.items()
        }
        done = {part: partial(progress.advance, bar) for part, bar in bars.items()}
        probes = _probes(model, tokenizer, to_fit, config, checkpoint, begun, done)
        judged = torch.zeros(len(probes), len(BUDGETS), dtype=torch.float64)
        for context in left_out:
            judged += divergences(model, tokenizer, context, probes, config.part) / len(left_out)
            done["judge"]()
    of_probes = [tuple(round(each, 4) for each in row) for row in judged.tolist()]
    facts = ProbeFacts(
        written_by=__version__,
        model=of_model,
        settings=settings,
        quality=QualityFacts(
            num_tokens=sum(map(len, to_fit)),
            num_tokens_left_out=sum(map(len, left_out)),
            budgets=BUDGETS,
            fitted=of_probes[0],
            tuned=of_probes[-1],
        ),
    )
    Probe(probes[-1].cpu(), facts).save(path)
    checkpoint.remove()
    return path, facts


def _probes(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    contexts: list[list[int]],
    config: CalibrationConfig,
    checkpoint: Checkpoint,
    begun: dict[str, torch.Tensor],
    done: Mapping[str, Callable[[], None]],
) -> list[torch.Tensor]:
    """The fitted weights and, if steps are asked for, the tuned ones; kept on the way."""
    if not begun:
        weights, spread = fit(model, tokenizer, contexts, config, done["fit"])
        begun = {"weights": weights, **spread._asdict()}
        checkpoint.keep(begun)
    begun = {name: tensor.to(model.device) for name, tensor in begun.items()}
    weights, spread = begun["weights"], Spread(*(begun[name] for name in Spread._fields))
    if not config.steps:
        return [weights]

    def keep(state: dict[str, torch.Tensor]) -> None:
        checkpoint.keep(begun | state)

    of_tuning = (weights, spread, contexts, config, done["tune"], begun, keep)
    return [weights, tuned(model, tokenizer, *of_tuning)]


def read_contexts(
    tokenizer: "PreTrainedTokenizerBase", config: CalibrationConfig, are_left_out: bool = False
) -> list[list[int]]:
    """Token ids of the texts that a probe is fitted to, kinds in turn; or of those left out.

    There are several kinds, since what matters in code is not what matters in prose.

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


def model_facts(model: "PreTrainedModel", name: str) -> ModelFacts:
    """What a probe says of its model, given its folder or hub name, or none for the small model.

    Raises:
        ConfigError: If its weights are not kept as safetensors.
    """
    shape, layers = model.config.get_text_config(), attending_layers(model)
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return ModelFacts(
        name=Path(name).name or NAME,
        fingerprint=fingerprint(model_folder(name)),
        num_layers=len(layers),
        layers=None if len(layers) == shape.num_hidden_layers else tuple(layers),
        num_kv_heads=getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads,
        head_size=head_size,
    )
