"""The calibration from the command line to its file, on a random model and real code."""

from pathlib import Path

import pytest
import torch
from papers.continuation import continue_prompt
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from tests.engine.random_hybrids import granite_h
from tests.offline.conftest import HEAD_SIZE, NUM_KV_HEADS, NUM_LAYERS
from vllm_kvselect.calibration.calibration import read_contexts
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.cli import app
from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.kvzip import chunks
from vllm_kvselect.offline.retained import Prompt, retained_entries
from vllm_kvselect.probes.file import Probe

SMALL = (
    *("--texts", "code,pairs", "--tokens", "1800", "--length", "300"),
    *("--steps", "8", "--dtype", "float32"),
)


def run(*options: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ("calibrate", *options), env=environment)


@pytest.fixture(scope="module")
def calibrated(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    path = tmp_path_factory.mktemp("probe") / "probe.safetensors"
    return run(str(llama_folder), *SMALL, "--out", str(path)), path


def test_the_file_says_what_it_is_of(calibrated: tuple[Result, Path], llama_folder: Path) -> None:
    result, path = calibrated
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(path)
    weights, facts = Probe.load(path)
    assert weights.isfinite().all()
    assert facts.model.name == llama_folder.name
    assert facts.model.shape == (NUM_LAYERS, 2 * HEAD_SIZE + 1, NUM_KV_HEADS)
    assert facts.settings["texts"] == ["code", "pairs"]
    assert not {"model", "out"} & set(facts.settings)
    # Three texts of each kind, and one left out; a question takes some of the 300 tokens.
    assert 1500 < facts.quality.num_tokens < 1800
    assert 500 < facts.quality.num_tokens_left_out < 600
    assert f"{facts.quality.num_tokens} tokens" in result.stdout
    assert facts.quality.fitted != facts.quality.tuned
    assert f"{facts.quality.fitted[1]:.3f} -> {facts.quality.tuned[1]:.3f} at" in result.stdout


def test_the_quality_is_that_of_the_probe_in_the_file(
    calibrated: tuple[Result, Path], llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Judged again by the offline room's run on dropped entries, and by the definition."""
    weights, facts = Probe.load(calibrated[1])
    config = CalibrationConfig.parse({**facts.settings})
    left_out = read_contexts(tokenizer, config, are_left_out=True)
    for budget, expected in zip(facts.quality.budgets, facts.quality.tuned, strict=True):
        found = 0.0
        for context in left_out:
            layers = capture(llama, context)
            prompt = Prompt(layers, len(context), block_size=1, probe=weights)
            method = EvictionConfig(method="layer-probe", budget=budget, window=1)
            retained = retained_entries(prompt, method)
            everything, total = torch.ones_like(retained), 0.0
            for chunk in chunks(tokenizer, context, config.part):
                runs = (
                    continue_prompt(llama, layers, context, chunk.token_ids, entries)
                    for entries in (everything, retained)
                )
                size = chunk.stop - chunk.start
                full, part = (run.logits[-size - 1 : -1].double().softmax(-1) for run in runs)
                total += (full * (full / part).log()).sum().item()
            found += total / len(context) / len(left_out)
        assert found > 0.01
        assert found == pytest.approx(expected, rel=0.02)


def test_texts_left_out_are_others(tokenizer: PreTrainedTokenizerBase) -> None:
    config = CalibrationConfig(texts=("code", "pairs"), tokens=1800, length=300)
    fitted = {tuple(context) for context in read_contexts(tokenizer, config)}
    left_out = {tuple(context) for context in read_contexts(tokenizer, config, are_left_out=True)}
    assert len(fitted) == 6
    assert len(left_out) == 2
    assert not fitted & left_out


def test_without_a_place_it_goes_into_the_cache(llama_folder: Path, tmp_path: Path) -> None:
    options = ("--texts", "pairs", "--tokens", "300", "--length", "300", "--steps", "0")
    result = run(str(llama_folder), *options, XDG_CACHE_HOME=str(tmp_path))
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "vllm-kvselect" / "probes").iterdir()
    facts = Probe.load(path).facts
    assert facts.quality.fitted == facts.quality.tuned
    assert "->" not in result.stdout
    assert facts.settings["dtype"] == dtype_name(fast_dtype())
    assert path.name == f"{llama_folder.name}-{facts.model.fingerprint[:12]}.safetensors"
    assert result.stdout.splitlines()[-1] == str(path)


def test_of_a_hybrid_the_file_has_the_layers_that_attend(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, path = granite_h(), tmp_path / "probe.safetensors"
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    options = ("--texts", "pairs", "--tokens", "300", "--length", "300", "--steps", "2")
    result = run(str(tmp_path / "model"), *options, "--out", str(path))
    assert result.exit_code == 0, result.output
    probe = Probe.load(path)
    assert probe.facts.model.layers == (1, 3)
    assert torch.equal(probe.of_layer(3), probe.weights[1])
    with pytest.raises(ConfigError, match="no weights of layer 0"):
        probe.of_layer(0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tokens", "0"), "tokens = 0"),
        (("--texts", ","), "texts = "),
        (("--texts", "no-such-folder"), "neither 'sotu', 'stdlib', 'records' nor a folder"),
        (("--dtype", "int8"), "dtype = 'int8'"),
        (("--steps", "-1"), "steps = -1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: tuple[str, ...], reason: str, llama_folder: Path
) -> None:
    result = run(str(llama_folder), *options)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


def test_a_folder_of_ones_own_will_do(llama_folder: Path, tmp_path: Path) -> None:
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text("To be, or not to be.\n\n" * 200, encoding="utf-8")
    path = tmp_path / "probe.safetensors"
    options = ("--texts", str(tmp_path), "--tokens", "600", "--length", "300", "--steps", "1")
    result = run(str(llama_folder), *options, "--out", str(path))
    assert result.exit_code == 0, result.output
    assert Probe.load(path).facts.settings["texts"] == [tmp_path.name]
