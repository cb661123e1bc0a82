"""Times the Python of decode steps in a graph, and counts their launches, by rows.

Run as a module, with `time` or `launches`; prints JSON.

`time`: what the CUDA builder makes of a step's metadata, in microseconds of a core, the median of
many steps: for methods that look through no queries, or through those of the last tokens, with
rounds to come or without. Tensors are a processor's, and so are copies and operators: on a card
these are launches, which take about as long. Nothing is attended to.

`launches`: what a step in which nothing changed launches in so many layers on the fake device of
`fake_device.py`, where four rows may run at once; of attention's own call only the kernel that
finds out how sequences are shared out. Wants `TRITON_INTERPRET=1`.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.engine import cuda_layers, flash_attention
from tests.engine.cuda_layers import Layers, vllm_config
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cuda import any_order
from vllm_kvselect.engine.drop.request import LiveRequests
from vllm_kvselect.engine.step.worker import EvictionWorker
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.paging.order import Sharing

ROWS = (1, 16, 64)
NUM_LAYERS, FEW_ROWS = 8, (1, 2, 4)
OF_AN_H100, OWN_SCHEDULE = Sharing(128, 132, 32, 3), "prepare_varlen_num_blocks"
NUM_TOKENS, NUM_STEPS = 100, 60
SETTINGS: dict[str, dict[str, Any]] = {
    "layer-probe": {"method": "layer-probe"},
    "snapkv": {"method": "snapkv"},
    "layer-probe, rounds to come": {"method": "layer-probe", "decode_budget": 48},
}


def microseconds(values: dict[str, Any], num_rows: int) -> float:
    """The median time that the builder takes for a step of so many rows, in a graph."""
    eviction = EvictionConfig.parse({"window": 8, "budget": 48, "decode_interval": 100, **values})
    layers = Layers(eviction, REFERENCES, vllm_config(graphs=True))
    requests = [layers.served(NUM_TOKENS, NUM_TOKENS + 130, eviction) for _ in range(num_rows)]
    live, ids = LiveRequests(eviction, 16), [str(index) for index in range(num_rows)]
    live._requests = {name: each.prompt for name, each in zip(ids, requests, strict=True)}
    worker: Any = SimpleNamespace(
        use_v2_model_runner=True, _row_ids=ids, _is_dummy=False, _requests=live
    )
    builder = layers.builder
    builder._splitter = builder.splitter(lambda common: EvictionWorker._requests_of(worker, common))
    rows = [(request, 1) for request in requests]
    # A cut looks through what earlier steps kept, of which nothing is asked here.
    for request in requests:
        request.num_computed = NUM_TOKENS
        request.prompt.progress.num_made = 1
    layers.state.version += 1
    taken = []
    for _ in range(NUM_STEPS):
        common = layers.common(rows)
        begin = thread_time()
        builder.build(0, common)
        taken.append(1e6 * (thread_time() - begin))
        for request in requests:
            request.num_computed += 1
    return round(median(taken[5:]), 1)


def launches(num_rows: int, sharing: Sharing | None = OF_AN_H100) -> list[str]:
    """What a step of so many rows launches.

    Args:
        num_rows: The rows.
        sharing: What attention may be told of how sequences are shared out; if nothing, it launches
            a kernel of its own for each layer.
    """
    from tests.engine.fake_device import BACKENDS, DEVICE, FakeLayers, config_of_all, device
    from tests.launches import recorded
    from vllm_kvselect.kernels import cuda

    eviction, parts = EvictionConfig.parse({"method": "knorm", "window": 8, "budget": 48}), []

    @contextmanager
    def noted() -> Iterator[None]:
        with recorded(DEVICE) as part:
            parts.append(part)
            yield

    def attend(given: Any, *_: Any) -> None:
        if parts and given["scheduler_metadata"] is None:
            parts[-1].append(OWN_SCHEDULE)

    with device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_layers, "NUM_LAYERS", NUM_LAYERS)
        patch.setattr(any_order.Trial, "sharing", lambda *_: sharing)
        patch.setattr(any_order, "attend", attend)
        layers = FakeLayers(eviction, cuda.KERNELS, config_of_all(), BACKENDS[0])
        requests = [layers.served(NUM_TOKENS, NUM_TOKENS + 9, eviction) for _ in range(num_rows)]
        layers.run(*((request, NUM_TOKENS) for request in requests))
        rows = [(request, 1) for request in requests]
        layers.run(*rows)
        common = layers.common(rows)
        with noted():
            metadata = layers.builder.build(0, common)
        layers.forward(rows, common, metadata, guard=noted)
    return [launch for part in parts for launch in part]


def time() -> dict[str, dict[int, float]]:
    """Microseconds of each setting, by rows."""
    with pytest.MonkeyPatch.context() as patch:
        flash_attention.install(patch)
        patch.setattr(cuda_layers, "MAX_NUM_SEQS", max(ROWS))
        patch.setattr(cuda_layers, "NUM_BLOCKS", 20 * max(ROWS))
        return {
            name: {rows: microseconds(values, rows) for rows in ROWS}
            for name, values in SETTINGS.items()
        }


if __name__ == "__main__":
    if sys.argv[1:] == ["launches"]:
        _setup_privateuseone_for_python_backend("card")
        found: Any = {
            "told": {num_rows: launches(num_rows) for num_rows in FEW_ROWS},
            "not told": {num_rows: launches(num_rows, None) for num_rows in FEW_ROWS[:1]},
        }
    else:
        found = time()
    sys.stdout.write("\n" + json.dumps(found))
