"""A calibration that is stopped goes on where it was, and ends where it would have ended."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.calibration.test_command import run
from vllm_kvselect.calibration import calibration
from vllm_kvselect.calibration.calibration import read_contexts
from vllm_kvselect.calibration.checkpoint import Checkpoint
from vllm_kvselect.calibration.fit import fit
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.tuning import KEPT_EVERY, tuned
from vllm_kvselect.config import ConfigError
from vllm_kvselect.probes.file import Probe

STEPS = KEPT_EVERY + 3
OPTIONS = (
    *("--texts", "pairs", "--tokens", "600", "--length", "300"),
    *("--steps", str(STEPS), "--dtype", "float32", "--rate", "0.03"),
)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every fit, that of the trial aside."""
    found: list[int] = []

    def counted(*arguments: object) -> object:
        found.append(1)
        return fit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(calibration, "fit", counted)
    return found


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the next calibration be interrupted once this step is kept; 0 is the end of the fit."""
    keep = Checkpoint.keep

    def kept(self: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
        keep(self, tensors)
        if int(tensors.get("step", torch.tensor(0))) == step:
            monkeypatch.setattr(Checkpoint, "keep", keep)
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "keep", kept)


@pytest.fixture(scope="module")
def in_one_go(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    path = tmp_path_factory.mktemp("one-go") / "probe.safetensors"
    result = run(str(llama_folder), *OPTIONS, "--out", str(path))
    assert result.exit_code == 0, result.output
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    return Probe.load(path)


@pytest.mark.parametrize("step", [0, KEPT_EVERY])
def test_the_same_command_goes_on_and_makes_the_same_probe(
    step: int,
    in_one_go: Probe,
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fits: list[int],
) -> None:
    path = tmp_path / "probe.safetensors"
    stop_at(step, monkeypatch)
    assert run(str(llama_folder), *OPTIONS, "--out", str(path)).exit_code != 0
    assert len(fits) == 1
    assert [each.name for each in tmp_path.iterdir()] == [".probe.safetensors.begun"]
    result = run(str(llama_folder), *OPTIONS, "--out", str(path))
    assert result.exit_code == 0, result.output
    assert len(fits) == 1
    probe = Probe.load(path)
    assert torch.equal(probe.weights, in_one_go.weights)
    assert probe.facts == in_one_go.facts
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("options", [("--seed", "1"), ("--rate", "0.01"), ("--tokens", "900")])
def test_other_settings_begin_anew(
    options: tuple[str, str],
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fits: list[int],
) -> None:
    command = (str(llama_folder), *OPTIONS, "--out", str(tmp_path / "probe.safetensors"))
    stop_at(0, monkeypatch)
    run(*command)
    stop_at(0, monkeypatch)
    run(*command, *options)
    assert len(fits) == 2


def test_a_state_is_all_that_later_steps_depend_on(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    values = {"texts": ("pairs",), "tokens": 512, "length": 256, "steps": STEPS, "part": 32}
    config = CalibrationConfig.parse({**values, "rate": 0.03})
    contexts = read_contexts(tokenizer, config)
    weights, spread = fit(llama, tokenizer, contexts, config)
    states: list[dict[str, torch.Tensor]] = []
    steps: list[int] = []
    of_tuning = (llama, tokenizer, weights, spread, contexts, config)
    expected = tuned(*of_tuning, keep=states.append)
    (state,) = states
    assert not torch.equal(expected, weights)
    found = tuned(*of_tuning, lambda: steps.append(1), begun=state)
    assert torch.equal(found, expected)
    assert len(steps) == STEPS - KEPT_EVERY
    for name in ("in_units", "exp_avg", "exp_avg_sq", "generator"):
        spoilt = {**state, name: torch.zeros_like(state[name])}
        if name == "generator":
            spoilt[name] = torch.Generator().manual_seed(7).get_state()
        assert not torch.equal(tuned(*of_tuning, begun=spoilt), expected), name


def test_damage_and_progress_of_others_are_not_found(tmp_path: Path) -> None:
    result, tensors = tmp_path / "folder" / "probe.safetensors", {"weights": torch.randn(3, 2)}
    checkpoint = Checkpoint.beside(result, {"seed": 0}, [[1, 2]])
    assert checkpoint.read() == {}
    checkpoint.keep({name: tensor.T for name, tensor in tensors.items()})
    assert torch.equal(checkpoint.read()["weights"], tensors["weights"].T)
    for others in (({"seed": 1}, [[1, 2]]), ({"seed": 0}, [[1, 3]])):
        assert Checkpoint.beside(result, *others).read() == {}
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:-5])
    assert checkpoint.read() == {}
    checkpoint.remove()
    assert not list(result.parent.iterdir())
    checkpoint.remove()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        Checkpoint.beside(tmp_path / "file" / "probe", 0).keep({"weights": torch.zeros(1)})
