"""What a processor multiplies fast, by what PyTorch says of it."""

import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest
import torch

from tests.own_process import python
from vllm_kvselect.machine import (
    default_device,
    default_dtype,
    dtype_name,
    fast_dtype,
    machine,
    processor,
)

X86 = {"architecture": "x86_64"}
ARM = {"architecture": "aarch64"}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Every test asks anew, and leaves nothing behind."""
    fast_dtype.cache_clear()
    yield
    fast_dtype.cache_clear()


@pytest.mark.parametrize(
    ("capabilities", "capability", "onednn", "expected"),
    [
        pytest.param({**X86, "avx2": True}, "AVX2", False, "float32", id="AVX2"),
        pytest.param({**X86, "avx512_f": True}, "AVX512", True, "float32", id="AVX-512 alone"),
        pytest.param({**X86, "avx512_bf16": True}, "AVX512", True, "bfloat16", id="AVX512_BF16"),
        pytest.param({**X86, "amx_bf16": True}, "AVX512", True, "bfloat16", id="AMX"),
        pytest.param({**X86, "amx_bf16": True}, "AVX2", True, "float32", id="AMX held back"),
        pytest.param({**ARM, "bf16": True}, "DEFAULT", True, "bfloat16", id="arm64 with bf16"),
        pytest.param(ARM, "DEFAULT", False, "float32", id="arm64 without"),
    ],
)
def test_bfloat16_is_fast_where_there_are_instructions_for_it(
    capabilities: dict[str, object],
    capability: str,
    onednn: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert dtype_name(fast_dtype()) == expected


def test_pytorch_held_to_older_instructions_is_fast_in_float32() -> None:
    code = "from vllm_kvselect.machine import fast_dtype; print(fast_dtype())"
    assert python("-c", code, ATEN_CPU_CAPABILITY="avx2").stdout == "torch.float32\n"


@pytest.mark.parametrize("has_card", [False, True])
def test_models_run_on_a_gpu_where_there_is_one(
    has_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    assert default_device() == torch.device("cuda" if has_card else "cpu")
    assert default_dtype() == ("auto" if has_card else dtype_name(fast_dtype()))


def test_a_measurement_says_where_it_ran() -> None:
    found = machine()
    assert found["cpu"] == processor()
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["plugin"] == version("vllm-kvselect")
