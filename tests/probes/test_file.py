from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_kvselect.config import ConfigError
from vllm_kvselect.probes.file import ModelFacts, Probe, ProbeFacts, QualityFacts

MODEL = ModelFacts(name="small", fingerprint="ab12", num_layers=2, num_kv_heads=2, head_size=8)
FACTS = ProbeFacts(
    written_by="1.2.3",
    model=MODEL,
    settings={"target": "kvzip", "texts": ["prose"], "ridge": 1e-3},
    quality=QualityFacts(
        num_tokens=900,
        num_tokens_left_out=300,
        budgets=(0.125, 0.0625),
        fitted=(0.2, 0.6),
        tuned=(0.1, 0.3),
    ),
)


AGAIN = "make it with `vllm-kvselect calibrate some/model`"


@pytest.fixture
def probe() -> Probe:
    generator = torch.Generator().manual_seed(0)
    return Probe(torch.randn(MODEL.shape, generator=generator), FACTS)


def rewritten(path: Path, weights: torch.Tensor, **metadata: str) -> Path:
    save_file({"weights": weights}, path, metadata)
    return path


def test_what_is_written_is_read(probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.safetensors"
    probe.save(path)
    found = Probe.load(path)
    assert torch.equal(found.weights, probe.weights)
    assert found.facts == FACTS
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert list(load_file(path)) == ["weights"]  # others read it too


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*none; make it with `vllm-kvselect calib"):
        Probe.load(tmp_path / "none")


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("weights", encoding="utf-8")
    with pytest.raises(ConfigError, match="text is not a safetensors file"):
        Probe.load(path)


def test_other_safetensors_files_are_refused(probe: Probe, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "model", probe.weights, format="pt")
    with pytest.raises(ConfigError, match="holds no probe"):
        Probe.load(path)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (FACTS.model_dump_json().replace('"version":3', '"version":2'), "version: Input should"),
        (FACTS.model_dump_json().replace('"fitted"', '"share"'), r"quality\.fitted: Field req"),
        ("", "Invalid JSON"),
    ],
)
def test_other_versions_are_refused(probe: Probe, tmp_path: Path, facts: str, reason: str) -> None:
    names = {"format": "vllm-kvselect-probe", "facts": facts}
    path = rewritten(tmp_path / "probe", probe.weights, **names)
    with pytest.raises(ConfigError, match=f"another version than 3 .*{reason}.*; {AGAIN} anew"):
        Probe.load(path, "some/model")


@pytest.mark.parametrize("wrong", [torch.zeros(2, 16, 2), torch.zeros(MODEL.shape).double()])
def test_weights_of_another_shape_or_type_are_refused(
    probe: Probe, tmp_path: Path, wrong: torch.Tensor
) -> None:
    path = tmp_path / "probe"
    probe._replace(weights=wrong).save(path)
    with pytest.raises(ConfigError, match=r"needs float32 of \(2, 17, 2\)"):
        Probe.load(path)


def test_a_folder_that_cannot_be_written_is_an_error(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        probe.save(tmp_path / "file" / "probe")
