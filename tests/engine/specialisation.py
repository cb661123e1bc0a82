"""Records what Triton compiles kernels for, without compiling: in the warm-up, then in traffic.

Run as a module in a process of its own, where Triton is not interpreted: launches stop at the key
under which Triton would look for a compiled kernel, and the references compute what was asked for.
Prints, for each server, how many keys there are and those that traffic asks for first.
"""

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction, compute_cache_key
from vllm.v1.attention.backends import flash_attn

from tests.engine import cuda_layers, flash_attention
from tests.engine.cuda_layers import Layers, vllm_config
from tests.engine.cuda_traffic import SERVERS, Wish, serve
from tests.kernels.compiled import Device
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cuda import any_order
from vllm_kvselect.engine.cuda.warm_up import warm_up
from vllm_kvselect.kernels import cuda, rows
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.paging.order import Sharing
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.inputs import scorer_named

SIZES = {"MAX_MODEL_LEN": 20480, "NUM_BLOCKS": 4100}
"""Of `cuda_layers`: prompts of all lengths for which kernels differ."""
LONGEST = 20000
QUADRATIC = ("r-kv",)
"""Their scores take long on a processor, and no kernel: such prompts are shorter."""


class Recorder:
    """Stands in for `JITFunction.run`.

    Attributes:
        keys: What was asked for so far: module, kernel, key.
    """

    def __init__(self) -> None:
        self.keys: set[tuple[str, str, str]] = set()

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        binder = kernel.device_caches[0][-1]
        _, specialization, options = binder(*args, **given)
        key = compute_cache_key({}, specialization, options)
        self.keys.add((kernel.module.split(".")[-1], kernel.__name__, str(key)))


def both(twin: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Asks for what the twin launches, and computes by the reference."""
    if twin is reference:
        return reference

    def call(*args: Any, **kwargs: Any) -> Any:
        twin(*args, **kwargs)
        return reference(*args, **kwargs)

    call.__name__ = getattr(twin, "func", twin).__name__  # some are references with twins inside
    return call


def row_by_row(name: str, held: Held, *given: Any) -> torch.Tensor:
    """What the references say of rows, by the name of a twin."""
    of_values: dict[str, Callable[..., torch.Tensor]] = {
        "projected_value_norms": rows.value_norms,
        "select_pruned": rows.select_pruned,
    }
    if name in of_values:
        return of_values[name](REFERENCES, held, *given)
    (scorer,) = {
        scorer_named(part)
        for method in METHODS.values()
        for part in (method.scores, method.weights)
        if part is not None and part.endswith(f":{name}")
    }
    return rows.scores(REFERENCES, scorer, held, *given)


def wishes(eviction: EvictionConfig, methods: tuple[str, ...], draw: random.Random) -> list[Wish]:
    """Requests of random lengths, with what a server lets them choose."""
    drawn = []
    for index in range(14):
        own: dict[str, Any] = {}
        if methods:
            own["method"] = methods[index % len(methods)]
        if "budget" in eviction.allow_override:
            own["budget"] = draw.choice((0.05, 0.125, 0.5, 100, 300, 700, 2500, 5000))
        if "decode_budget" in eviction.allow_override:
            own["decode_budget"] = draw.choice((64, 300, 1500, 4000, 9000))
        if eviction.may_make_rounds:
            own["decode_interval"] = 32
        config = EvictionConfig.parse({**eviction.model_dump(), **own})
        longest = 2500 if config.method.startswith(QUADRATIC) else LONGEST
        length = int(math.exp(draw.uniform(math.log(60), math.log(longest))))
        drawn.append(Wish(length, 70 if eviction.may_make_rounds else 3, config))
    return drawn


def new_keys(
    values: dict[str, Any], methods: tuple[str, ...], seed: int, graphs: bool
) -> tuple[int, list[str]]:
    """Keys after the warm-up of a server, and those that its traffic adds."""
    recorder, draw = Recorder(), random.Random(seed)
    JITFunction.run = lambda kernel, *args, **given: recorder.run(kernel, *args, **given)
    eviction = EvictionConfig.parse({"method": "adakv-perturb", **values})
    kernels = Kernels(
        **{
            part.name: both(getattr(cuda.KERNELS, part.name), getattr(REFERENCES, part.name))
            for part in fields(Kernels)
            if part.name != "over_rows"
        },
        over_rows={
            name: both(twin, partial(row_by_row, name))
            for name, twin in cuda.KERNELS.over_rows.items()
        },
    )
    config = vllm_config(graphs=graphs, dtype="float32")
    layers = Layers(eviction, kernels, config)
    warm_up(layers.builder, methods or (eviction.method,), eviction)
    known = set(recorder.keys)
    serve(layers, wishes(eviction, methods, draw), draw, most=3)
    return len(known), sorted(" ".join(key) for key in recorder.keys - known)


def main(seed: int = 7) -> None:
    triton.runtime.driver.set_active(Device())
    with pytest.MonkeyPatch.context() as patch:
        flash_attention.install(patch)
        for name, size in SIZES.items():
            patch.setattr(cuda_layers, name, size)
        # What is attended to changes no launch.
        patch.setattr(flash_attn, "flash_attn_varlen_func", lambda **_: None)
        patch.setattr(any_order, "attend", lambda *_: None)
        patch.setattr(any_order.Trial, "takes_any_order", lambda *_: True)
        patch.setattr(any_order.Trial, "sharing", lambda _, most: Sharing(128, 132, most, 3))
        patch.setattr(flash_attention, "DTYPES", {torch.float32})
        found = {
            name: new_keys(*server, seed, graphs=index % 2 == 0)
            for index, (name, server) in enumerate(SERVERS.items())
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
