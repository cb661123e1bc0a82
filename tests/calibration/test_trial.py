"""What a calibration says before it starts."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.calibration.test_command import run
from vllm_kvselect.calibration.calibration import read_contexts
from vllm_kvselect.calibration.settings import QUICK, CalibrationConfig
from vllm_kvselect.calibration.trial import Trial, tried
from vllm_kvselect.probes.file import Probe

CONFIG = CalibrationConfig(texts=("pairs",), tokens=512, length=256, steps=400, part=32)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(2.0, "takes about 5 min and 2.5 GB"), (0.01, "takes about 1 min and 2.5 GB")],
)
def test_seconds_of_a_part_count_as_often_as_the_part_comes(seconds: float, said: str) -> None:
    trial = Trial(fit=seconds, tune=3 * seconds, judge=5 * seconds, memory=2_480_000_000)
    assert trial.said(texts=10, steps=40, left_out=4).startswith(said)


def test_a_trial_takes_one_of_each(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    context = read_contexts(tokenizer, CONFIG)[0]
    trial = tried(llama, tokenizer, context, CONFIG)
    assert min(trial[:3]) > 0
    assert max(trial[:3]) < 20, "a step, and not 400 of them"
    assert trial.memory > 100e6
    without = tried(llama, tokenizer, context, CONFIG.model_copy(update={"steps": 0}))
    assert without.tune < trial.tune / 2


def test_it_is_said_before_the_work_begins(llama_folder: Path, tmp_path: Path) -> None:
    """Of a quick one, whose settings are not to be had otherwise."""
    path = tmp_path / "probe.safetensors"
    options = ("--quick", "--texts", "pairs", "--steps", "5", "--out", str(path))
    result = run(str(llama_folder), *options)
    assert result.exit_code == 0, result.output
    assert "takes about 1 min and" in result.stderr
    assert "->" not in result.stdout, "nothing was tuned"
    assert QUICK.items() <= Probe.load(path).facts.settings.items()
