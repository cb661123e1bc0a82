"""Every file in configs/ runs: it is valid, its method is served, its comment says how."""

from pathlib import Path

import pytest

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.methods import METHODS

FILES = sorted(Path(__file__).parents[1].glob("configs/*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_configuration_is_valid_and_served(path: Path) -> None:
    config = EvictionConfig.parse(EvictionConfig.read_file(path))
    assert METHODS[config.method].unserved is None
    command = f"#   vllm serve MODEL --kv-eviction-config configs/{path.name}\n"
    assert command in path.read_text(encoding="utf-8")


def test_every_family_that_is_served_has_one() -> None:
    methods = [METHODS[EvictionConfig.read_file(path)["method"]] for path in FILES]
    families = {(m.scorer, m.ranking, m.allocator) for m in METHODS.values() if not m.unserved}
    assert {(m.scorer, m.ranking, m.allocator) for m in methods} == families
