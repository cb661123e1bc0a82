"""A chunk as a probe reads it, and how far a twin of `probed_scores` may be off."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from tests.strategies import Shape, random_layer, rotation
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.probe import PER_TOKEN, probe_features, probed_scores
from vllm_kvselect.scoring.rotation import Rotation

ROTATIONS = st.sampled_from(("none", "halves", "neighbours", "stretched"))


def rotated_by(kind: str, head_size: int) -> Rotation | None:
    """A rotation of all channels but the last two, or none."""
    turn = rotation(head_size)
    rotations = {
        "none": None,
        "halves": turn,
        "neighbours": replace(turn, interleaved=True),
        "stretched": Rotation(1.5 * turn.cos, 1.5 * turn.sin),
    }
    return rotations[kind]


def probe_inputs(
    shape: Shape, seed: int, dtype: torch.dtype, kind: str, device: str
) -> ScoringInputs:
    """Keys and values as a fused projection writes them: parts of the same rows."""
    layer = random_layer(shape, seed, dtype)
    # [num_kv_heads, num_tokens, head_size] -> [num_tokens, num_kv_heads, head_size]
    fused = torch.cat([part.transpose(0, 1) for part in (layer.key, layer.value)], dim=1).to(device)
    key, value = (part.transpose(0, 1) for part in fused.split(shape.num_kv_heads, dim=1))
    rotation, no_query = rotated_by(kind, shape.head_size), fused[:0, :0]
    if rotation is not None:
        rotation = replace(rotation, cos=rotation.cos.to(device), sin=rotation.sin.to(device))
    probe = layer.probe.to(device)
    return ScoringInputs(no_query, key, value, shape.scale, rotation=rotation, probe=probe)


def check_probed(scores: torch.Tensor, inputs: ScoringInputs, first_position: int) -> None:
    """Compares a twin's scores with those of the reference in float64.

    A sum of n products is off by n eps of the sum of their magnitudes; those of a rotated pair are
    at most twice its larger channel before the rotation. An exponential is off, relatively, by as
    much as its argument, and by an eps of its own.
    """
    names = ("key", "value", "probe")
    exact = replace(inputs, **{name: getattr(inputs, name).double() for name in names})
    expected = probed_scores(exact, first_position)
    assert scores.dtype == torch.float32
    assert inputs.probe is not None
    largest = probe_features(exact, first_position).abs().amax(dim=2)
    magnitudes = 2 * largest * inputs.probe.double().abs().sum(dim=0)[:, None]
    terms = inputs.probe.shape[0] + 8
    position = PER_TOKEN * (first_position + inputs.key.shape[1])
    bound = terms * torch.finfo(torch.float32).eps * (magnitudes + position + 1)
    assert ((scores - expected).abs() <= bound * expected).all()
