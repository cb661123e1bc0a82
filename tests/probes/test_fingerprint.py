from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from vllm_kvselect.config import ConfigError
from vllm_kvselect.probes import fingerprint as module
from vllm_kvselect.probes.fingerprint import fingerprint, full_fingerprint


def test_a_copy_has_the_same_in_one_file_or_many(
    llama: PreTrainedModel, llama_folder: Path, tmp_path: Path
) -> None:
    llama.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert fingerprint(str(tmp_path)) == fingerprint(str(llama_folder))


@pytest.mark.parametrize(("dtype", "added"), [(torch.float32, 1e-3), (torch.bfloat16, 0.0)])
def test_other_weights_and_other_data_types_have_another(
    dtype: torch.dtype, added: float, llama: PreTrainedModel, llama_folder: Path, tmp_path: Path
) -> None:
    weights = {name: tensor.to(dtype, copy=True) for name, tensor in llama.state_dict().items()}
    weights["model.layers.0.self_attn.k_proj.weight"][0, 0] += added
    llama.save_pretrained(tmp_path, state_dict=weights)
    assert fingerprint(str(tmp_path)) != fingerprint(str(llama_folder))


def test_a_model_of_the_hub_is_read_where_it_was_downloaded_to(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laid out as huggingface_hub keeps it; any use of the network fails the test."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    repository = tmp_path / "models--some--model"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    for revision, name in (("main", "a" * 40), ("old", "b" * 40)):
        (repository / "refs" / revision).write_text(name)
    (repository / "snapshots" / ("a" * 40)).symlink_to(llama_folder)
    (repository / "snapshots" / ("b" * 40)).mkdir()
    assert fingerprint("some/model", download_dir=tmp_path) == fingerprint(str(llama_folder))
    for revision in ("old", "none"):
        with pytest.raises(ConfigError, match=r"some/model has no \.safetensors files"):
            fingerprint("some/model", revision, tmp_path)


@pytest.mark.parametrize("name", ["no/such-model", "s3://bucket/model"])
def test_a_model_that_is_not_here_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{name} has no \.safetensors files on this machine"):
        fingerprint(name, download_dir=tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"has no \.safetensors files"):
        fingerprint(str(tmp_path))


def test_the_full_one_knows_every_tensor_and_no_file(
    llama: PreTrainedModel, llama_folder: Path, tmp_path: Path
) -> None:
    own = full_fingerprint(str(llama_folder))
    llama.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert full_fingerprint(str(tmp_path / "many")) == own
    found = {own}
    for name, tensor in llama.state_dict().items():
        weights = {**llama.state_dict(), name: tensor + 1e-3}
        llama.save_pretrained(tmp_path / name, state_dict=weights)
        found.add(full_fingerprint(str(tmp_path / name)))
    assert len(found) == 1 + len(llama.state_dict())


def test_the_full_one_reads_some_rows_of_a_matrix(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[tuple[int, ...]] = []

    class Recorded:
        """A file that takes note of what is read whole."""

        def __init__(self, path: Path, framework: str) -> None:
            self._opened = safe_open(path, framework=framework)

        def __enter__(self) -> "Recorded":
            self._file = self._opened.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._opened.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor: torch.Tensor = self._file.get_tensor(name)
            whole.append(tuple(tensor.shape))
            return tensor

    expected = full_fingerprint(str(llama_folder))
    monkeypatch.setattr(module, "safe_open", Recorded)
    assert full_fingerprint(str(llama_folder)) == expected
    assert whole
    assert all(len(shape) == 1 for shape in whole)
