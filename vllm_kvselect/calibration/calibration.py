"""From a configuration to a probe in a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvselect import __version__
from vllm_kvselect.calibration.fit import fit
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.offline.attention import attending_layers
from vllm_kvselect.offline.models import load_model, load_tokenizer, model_folder
from vllm_kvselect.probes.file import ModelFacts, Probe, ProbeFacts, QualityFacts
from vllm_kvselect.probes.fingerprint import fingerprint
from vllm_kvselect.probes.places import default_path
from vllm_kvselect.tiny_model import NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def calibrated(config: CalibrationConfig) -> tuple[Path, ProbeFacts]:
    """Fits a probe and writes it.

    Args:
        config: Model and texts.

    Returns:
        The file and what it says of itself.

    Raises:
        EvaluationError: If the model cannot be loaded or calibrated, or if the texts do not fit.
        ConfigError: If its weights are not kept as safetensors, or the file cannot be written.
    """
    model, tokenizer = load_model(config.model, config.dtype), load_tokenizer(config.model)
    of_model = model_facts(model, config.model)
    found = fit(model, tokenizer, config)
    agreement = found.agreement
    facts = ProbeFacts(
        written_by=__version__,
        model=of_model,
        settings={
            **config.model_dump(mode="json", exclude={"model", "out"}),
            "texts": [Path(each).name for each in config.texts],  # a folder's place is private
        },
        quality=QualityFacts(
            num_tokens=found.num_tokens,
            num_tokens_left_out=found.num_tokens_left_out,
            correlations=tuple(round(each, 4) for each in agreement.correlations),
            correlation=round(agreement.correlation, 4),
            overlap=round(agreement.overlap, 4),
        ),
    )
    path = config.out or default_path(of_model.name, of_model.fingerprint)
    Probe(found.weights.cpu(), facts).save(path)
    return path, facts


def model_facts(model: "PreTrainedModel", name: str) -> ModelFacts:
    """What a probe says of its model.

    Args:
        model: The model.
        name: Folder or hub name; empty for the small model.

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
