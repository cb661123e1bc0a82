"""Launches of a decode step; see `decode_steps.py`."""

import pytest

pytest.importorskip("triton")
from tests.engine.decode_steps import FEW_ROWS, NUM_LAYERS, OWN_SCHEDULE
from tests.own_process import said_by

pytestmark = pytest.mark.timeout(1000)  # a minute on a busy machine


def test_launches_of_a_decode_step_are_one_and_a_table_for_as_many_layers_as_fit() -> None:
    launches: dict[str, dict[str, list[str]]] = said_by("tests.engine.decode_steps", "launches")
    for num_rows in FEW_ROWS:
        of_step = launches["told"][str(num_rows)]
        at_once = max(FEW_ROWS) // num_rows
        tables = ["_pages_kernel"] * (NUM_LAYERS // at_once)
        own = [launch for launch in of_step if launch != "aten.clone.default"]
        assert own == ["_longest_first_kernel", *tables]
        # Queries of several rows that come as slices of a fused projection.
        assert len(of_step) - len(own) == (0 if num_rows == 1 else NUM_LAYERS)
    # What FlashAttention is not told of it finds out in every layer.
    few = str(FEW_ROWS[0])
    assert sorted(launches["not told"][few]) == sorted(
        launches["told"][few] + [OWN_SCHEDULE] * NUM_LAYERS
    )
