"""What the doctor finds where an installation lacks something: each finding, and what it stops."""

import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins

from tests.engine.configurations import CudaPlatform, create, written
from tests.engine.test_models import MODELS
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine import platforms, sources
from vllm_kvselect.engine.doctor import Finding, examine
from vllm_kvselect.tiny_model import tiny_model


@pytest.fixture(autouse=True)
def plugins() -> None:
    load_general_plugins()


def found(model: str | None = None) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(model)}


def stopped(findings: dict[str, Finding]) -> list[str]:
    return [subject for subject, finding in findings.items() if finding.stops]


def test_nothing_stops_here() -> None:
    assert stopped(found(str(tiny_model()))) == []


def test_another_release_with_the_same_functions_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.40.0+cpu")
    findings = found()
    assert findings["vLLM"].text.startswith("0.40.0+cpu, unknown to this release")
    assert stopped(findings) == []


def test_a_function_that_changed_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.KNOWN_SOURCES, "AsyncLLM.generate", ("?",))
    findings = found()
    assert stopped(findings) == ["hooks"]
    assert "AsyncLLM.generate changed" in findings["hooks"].text


def test_a_name_that_vllm_lost_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.outputs.KVConnectorOutput")
    monkeypatch.delitem(sys.modules, "vllm_kvselect.engine.report")
    findings = found()
    assert stopped(findings) == ["names"]
    assert "cannot import name 'KVConnectorOutput'" in findings["names"].text


def test_a_plugin_that_is_left_out_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora,other")
    findings = found()
    assert stopped(findings) == ["plugin"]
    assert findings["plugin"].text == (
        "left out by VLLM_PLUGINS = 'lora,other'; unset it, or add kvselect"
    )


def test_model_runner_v2_on_cpu_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # as in an image with triton-cpu
    findings = found()
    assert stopped(findings) == ["model runner"]
    assert findings["model runner"].text.endswith("set VLLM_USE_V2_MODEL_RUNNER=0")


def test_without_vllm_nothing_more_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    findings = found()
    assert [*findings] == ["vllm-kvselect", "vLLM"]
    assert stopped(findings) == ["vLLM"]
    assert findings["vLLM"].text.startswith("ModuleNotFoundError: import of vllm halted")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_as_a_server_refuses_it(name: str, tmp_path: Path) -> None:
    settings = {**written(tmp_path, **MODELS[name][0]), "max_model_len": None}
    with pytest.raises(ConfigError) as refused:
        create({}, **settings)
    findings = found(str(tmp_path))
    assert stopped(findings) == ["model"]
    assert findings["model"].text == str(refused.value)


def test_a_model_that_is_not_there_is_refused_by_vllm() -> None:
    findings = found("/nowhere/model")
    assert stopped(findings) == ["model"]
    assert "/nowhere/model" in findings["model"].text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's words for a machine with a GPU, as the doctor and the checks read them."""
    from vllm import platforms as vllm_platforms

    found()  # what asks the platform when it is imported has asked the real one

    class Gpu(CudaPlatform):
        supported_dtypes = vllm_platforms.current_platform.supported_dtypes

        @staticmethod
        def get_device_capability() -> DeviceCapability:
            return DeviceCapability(9, 0)

        @staticmethod
        def get_device_name() -> str:
            return "NVIDIA H100"

        @staticmethod
        def device_count() -> int:
            return 2

    monkeypatch.setattr(platforms, "current_platform", Gpu)
    monkeypatch.setattr(vllm_platforms, "current_platform", Gpu, raising=False)
    return Gpu


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_named_with_its_capability() -> None:
    # Its model runner is not asked for: vLLM's configuration here is that of a CPU.
    before = takewhile(lambda finding: finding.subject != "model runner", examine())
    findings = {finding.subject: finding for finding in before}
    assert stopped(findings) == []
    assert findings["platform"].text == "cuda: NVIDIA H100 (x 2), compute capability 9.0"
    assert findings["data type"].text == "bfloat16 is fast"
    assert findings["kernels"].text.startswith("Triton 3.")
    assert findings["hooks"].text.startswith(f"all {len(sources.KNOWN_SOURCES)} functions")


@pytest.mark.parametrize(
    ("name", "said"),
    [("rocm", "platform 'rocm' has no backend yet"), (None, "vLLM finds no device here")],
)
def test_another_platform_and_none_stop_everything(
    name: str | None, said: str, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "is_cuda", lambda: False)
    monkeypatch.setattr(gpu, "device_name", name)
    findings = found()
    assert [*findings][-1] == "platform"
    assert findings["platform"].text.startswith(said)
