"""Models load onto the device that the machine has, in the type that was asked for."""

from pathlib import Path

import pytest
import torch

from vllm_kvselect import machine
from vllm_kvselect.offline.models import load_model
from vllm_kvselect.tiny_model import shallow_copy, tiny_model


@pytest.mark.parametrize(
    ("asked", "by_default", "expected"),
    [("float32", "auto", torch.float32), ("", "auto", torch.bfloat16), ("", "float16", torch.half)],
    ids=["asked for", "the model's own", "the processor's"],
)
def test_a_model_is_loaded_as_the_machine_says(
    asked: str,
    by_default: str,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(machine, "default_device", lambda: torch.device("meta"))
    monkeypatch.setattr(machine, "default_dtype", lambda: by_default)
    model = load_model(str(shallow_copy(tiny_model(), 2, tmp_path / "model")), asked)
    assert (model.device.type, model.dtype) == ("meta", expected)
    assert not any(weight.requires_grad for weight in model.parameters())
