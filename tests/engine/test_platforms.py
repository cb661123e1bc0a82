"""What differs between platforms, as the rest of the engine asks for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvselect.engine import platforms
from vllm_kvselect.engine.platforms import fixed_page_size, page_size_of


@pytest.mark.parametrize(
    ("name", "is_hybrid", "block_size", "fixed", "page_size"),
    [
        ("cpu", False, 128, 32, 32),
        ("cpu", True, 544, 32, 32),
        ("cuda", False, 64, None, 64),
        ("cuda", True, 544, 16, 16),
        ("xpu", False, 64, None, 64),
    ],
)
def test_a_page_is_a_block_or_a_part_of_one(
    name: str,
    is_hybrid: bool,
    block_size: int,
    fixed: int | None,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platforms, "platform_name", lambda: name)
    cache = SimpleNamespace(effective_attention_block_size=None, block_size=block_size)
    model = SimpleNamespace(is_hybrid=is_hybrid)
    vllm_config: Any = SimpleNamespace(cache_config=cache, model_config=model)
    assert fixed_page_size(vllm_config) == fixed
    assert page_size_of(vllm_config) == page_size
