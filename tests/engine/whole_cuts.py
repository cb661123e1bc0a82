"""Counts the launches of a step's cuts, method by method, for more and fewer layers and requests.

Run as a module in a process of its own, on the fake device of `fake_device.py`. Arguments are
methods; all without any. Prints, as JSON, the launches of each for each of `SIZES`, or what was
raised.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.engine import cuda_layers
from tests.engine.fake_device import BACKENDS, DEVICE, FakeLayers, config_of_all, device
from tests.launches import recorded
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cuda
from vllm_kvselect.registry import METHODS

SIZES = ((2, 1), (6, 1), (6, 3))
"""Layers, and requests that are due."""
NUM_TOKENS = 130


def launches_of(method: str, num_layers: int, num_requests: int) -> list[str]:
    """What is launched for the cuts of prompts that were computed in the step before."""
    eviction = EvictionConfig.parse({"method": method, "window": 8, "budget": 48})
    config = config_of_all()
    with device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_layers, "NUM_LAYERS", num_layers)
        layers = FakeLayers(eviction, cuda.KERNELS, config, BACKENDS[0])
        # What layers are bound to is stacked at the first cut, for good.
        first = layers.served(NUM_TOKENS, NUM_TOKENS + 2, eviction)
        layers.run((first, NUM_TOKENS))
        layers.common([(first, 1)])
        layers.make_rounds([(first, 1)])
        layers.release(first)
        requests = [
            layers.served(NUM_TOKENS, NUM_TOKENS + 2, eviction) for _ in range(num_requests)
        ]
        layers.run(*((request, NUM_TOKENS) for request in requests))
        rows = [(request, 1) for request in requests]
        layers.common(rows)
        assert all(request.prompt.due_cut is not None for request in requests)
        with recorded(DEVICE) as launches:
            layers.make_rounds(rows)
    return launches


def main(chosen: Sequence[str]) -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    found: dict[str, Any] = {}
    for method in chosen or METHODS:
        try:
            found[method] = [len(launches_of(method, *sizes)) for sizes in SIZES]
        except Exception:
            found[method] = traceback.format_exc()[-3000:]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
