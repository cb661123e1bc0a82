"""The small model's probe comes with the package."""

from pathlib import Path

import pytest

from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.probes.fingerprint import fingerprint
from vllm_kvselect.probes.places import find_probe
from vllm_kvselect.tiny_model import NAME, tiny_model


def test_the_small_models_probe_is_found_without_any_file_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_model())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe, path = find_probe(model, fingerprint(model), None)
    assert path.parent.name == "shipped"
    assert probe.facts.model.name == NAME
    defaults = CalibrationConfig().model_dump(mode="json", exclude={"model", "out", "dtype"})
    # It is older than records among the texts, as docs/methods.md says.
    older = {"texts": ["prose", "code", "several-needles", "pairs"], "dtype": "bfloat16"}
    assert probe.facts.settings == defaults | older
    at_an_eighth, at_a_sixteenth = probe.facts.quality.tuned
    assert at_an_eighth < 0.1 < at_a_sixteenth < 0.3
    assert probe.weights.isfinite().all()
