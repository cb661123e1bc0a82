"""Every file in configs/ runs: it is valid, and its comment says how."""

from pathlib import Path

import pytest

from vllm_kvselect.config import EvictionConfig, with_a_method
from vllm_kvselect.registry import AUTO, METHODS, PREFERRED

FILES = sorted(Path(__file__).parents[1].glob("configs/*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_configuration_is_valid(path: Path) -> None:
    values = with_a_method(EvictionConfig.read_file(path))
    if values["method"] == AUTO:  # a server chooses by its model
        values["method"] = PREFERRED[-1]
    config = EvictionConfig.parse(values)
    assert config.method in METHODS
    command = f"#   vllm serve MODEL --kv-eviction-config configs/{path.name}\n"
    assert command in path.read_text(encoding="utf-8")
