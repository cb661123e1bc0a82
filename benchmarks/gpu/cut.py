"""Cuts on a GPU, as a worker makes them between two steps: what they take of device and host.

Attention layers of vLLM in the shape of an 8B Llama, with our backend, the model's rotation, and a
random W_O and probe each, over a cache of random entries. No model is loaded, nothing is attended
to. All requests come to the end of their prompts at once.

The device's time is from the first launch to the last, while launches are queued behind a wait, as
far as its queue holds them; busy is the sum of what it did. The host's is from the call to its
return. Launches are what the device did: kernels, copies, fills.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _children import Answers, Row, run_child
from _device import DEVICE, HAS_CARD, host_time
from _engine import BenchmarkError
from _timing import median_time

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import REFERENCES

CUTS = ("layer-probe", "adakv-perturb", "thetakv", "snapkv")
CASES = ((4096,), (1000,) * 8) if HAS_CARD else ((160,), (160,) * 2)
"""Tokens of the requests that are due at once."""
BUDGET, ROUNDS = (0.125, 5) if HAS_CARD else (0.6, 1)
OVERHEADS = ("Activity Buffer", "Command Buffer", "Lazy Function", "Runtime Triggered", "Sync")
"""What a profile says of itself, beside what the device did."""


def make_ready(job: dict[str, Any]) -> tuple[Row, Answers]:
    """Makes every kind of cut once, which compiles kernels, and compares what is retained."""
    with torch.inference_mode():
        layers = Layers(job["model"])
        same = [layers.same_as_references(settings(method)) for method in CUTS]
    if HAS_CARD:
        torch.cuda.empty_cache()  # engines stand beside
    if min(same) < 0.98:  # roundings turn choices between nearly equal entries
        raise BenchmarkError(f"of what the references retain: {same}")
    said = ", ".join(f"{method} {share:.3%}" for method, share in zip(CUTS, same, strict=True))
    row = {"what": "entries that the references retain, too", "result": said, "same": same}
    return row, lambda command: measured(layers, **command)


@torch.inference_mode()
def measured(layers: "Layers", method: str, case: int) -> Row:
    """Times a kind of cut."""
    lengths = CASES[case]
    found = layers.measure(settings(method), lengths, ROUNDS)
    said = "device {device_ms:.2f} ms, busy {busy_ms:.2f}, host {host_ms:.2f}, {launches} launches"
    said = f"{said}, {{mib:.0f}} MiB beside the cache".format(**found)
    return {"what": f"{method}, {len(lengths)} x {lengths[0]:,}", "result": said} | found


def settings(method: str) -> EvictionConfig:
    """A server's configuration."""
    return EvictionConfig(method=method, budget=BUDGET)


class Layers:
    """All attention layers of a model, their cache and what they are bound to, without the model.

    Args:
        folder: The model's config.
        backend: Attention backend; that of the platform if left out.
        kernels: What computes a cut; the device's if left out.
    """

    def __init__(self, folder: str, backend: Any = None, kernels: Any = None) -> None:
        # They load vLLM.
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.import_utils import resolve_obj_by_qualname

        from vllm_kvselect.engine.platforms import platform
        from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec

        here = platform()
        assert here is not None
        backend = backend or resolve_obj_by_qualname(next(iter(here.backends.values())))
        self.block_size = here.page_size
        most_tokens, most = max(map(max, CASES)), max(map(len, CASES))
        config = EngineArgs(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            block_size=self.block_size,
            max_model_len=most_tokens + 1,
            max_num_seqs=most,
        ).create_engine_config()
        model, parallel = config.model_config, config.parallel_config
        self.num_layers = model.get_num_layers(parallel)
        self.num_heads = model.get_num_attention_heads(parallel)
        self.num_kv_heads = model.get_num_kv_heads(parallel)
        self.head_size, self.hidden_size = model.get_head_size(), model.get_hidden_size()
        self.dtype, self.window = model.dtype, settings(CUTS[0]).window
        self.random = torch.Generator(DEVICE).manual_seed(0)
        num_blocks = 1 + max(sum(map(self._num_blocks, lengths)) for lengths in CASES)
        shape = self.num_layers * num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size
        self.memory = torch.empty(shape, dtype=self.dtype, device=DEVICE)
        for cache in self.memory.chunk(self.num_layers):
            # Entries differ in strength, as real ones do.
            strength = self._randn(*cache.shape[:3], 1).square_()
            cache.copy_(self._randn(*cache.shape).mul_(strength))
        self._as_it_was = self.memory.clone()
        shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.blocks = shuffled.tolist()
        names = [f"layers.{index}.attn" for index in range(self.num_layers)]
        with set_current_vllm_config(config), torch.device(DEVICE):
            self.layers = [self._layer(name, config, backend) for name in names]
            self._bind(most_tokens)
            spec = HeadwiseSpec(
                block_size=self.block_size,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype=self.dtype,
                eviction=settings(CUTS[0]),
            )
            self.builder = backend.get_builder_cls()(spec, names, config, torch.device(DEVICE))
            self.start(kernels or device_kernels())
        query = self.num_heads, self.head_size
        self.queries = self._randn(self.num_layers, most * self.window, *query)
        self.due: list[Any] = []

    def start(self, kernels: Any) -> None:
        """Takes what computes cuts."""
        self.state = self.builder.start(lambda _: [], kernels)

    def _num_blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=DEVICE).to(self.dtype)

    def _layer(self, name: str, config: Any, backend: Any) -> Any:
        """vLLM's layer with our impl."""
        from vllm.model_executor.layers.attention import Attention

        return Attention(
            self.num_heads,
            self.head_size,
            self.head_size**-0.5,
            self.num_kv_heads,
            cache_config=config.cache_config,
            prefix=name,
            attn_backend=backend,
        )

    def _bind(self, most_tokens: int) -> None:
        """Gives layers their caches and what methods need: each a part of one piece of memory."""
        from vllm_kvselect.scoring.probe import num_features
        from vllm_kvselect.scoring.rotation import Rotation
        from vllm_kvselect.scoring.value_norms import OutputProjection

        exponents = torch.arange(0, self.head_size, 2, device=DEVICE) / self.head_size
        angles = torch.arange(most_tokens, device=DEVICE)[:, None] * 500000.0**-exponents
        rotation = Rotation(angles.cos(), angles.sin())
        group = self.num_heads // self.num_kv_heads
        shape = self.num_kv_heads, self.head_size, group, self.hidden_size
        weights = self._randn(self.num_layers, *shape).mul_(self.hidden_size**-0.5)
        forms = torch.stack([OutputProjection.of(weight).bound_form for weight in weights])
        features = num_features(self.head_size)
        probes = 0.05 * self._randn(self.num_layers, self.num_kv_heads, features).float()
        for index, cache in enumerate(self.memory.chunk(self.num_layers)):
            layer = self.layers[index]
            layer.kv_cache, layer.impl.rotation, layer.impl.probe = cache, rotation, probes[index].T
            layer.impl.output_projection = OutputProjection(weights[index], forms[index])

    def come_to_cut(self, config: EvictionConfig, lengths: Sequence[int]) -> None:
        """Puts requests before their cut, and the cache as it was before any."""
        from vllm_kvselect.engine.drop.request import Request
        from vllm_kvselect.engine.notice import Swap
        from vllm_kvselect.planning.plan import plan
        from vllm_kvselect.scoring.memory import StepQueries

        self.memory.copy_(self._as_it_was)
        seen = StepQueries(slice(None), self.num_layers)
        seen.take(self.queries)
        self.due, blocks = [], iter(self.blocks)
        for index, length in enumerate(lengths):
            request = Request(plan(config, None, None, length, self.block_size))
            cut, progress = request.plan.cuts[0], request.progress
            request.num_computed = cut.position
            held = [next(blocks) for _ in range(self._num_blocks(length))]
            # In an empty pool the fresh blocks are those that were given back.
            progress.swap = Swap(held, held[cut.first_packed : cut.tail_start])
            if (first := request.first_query(cut)) < cut.position:
                progress.queries.keep(seen, index * self.window, first, cut.position)
            self.due.append(request)

    def make(self) -> None:
        """Makes the cuts that are due."""
        self.builder.due.make(self.due)
        if any(request.next_cut is not None for request in self.due):
            raise RuntimeError("no cut was made")

    def same_as_references(self, config: EvictionConfig) -> float:
        """Which share of the entries that the references retain the device's kernels retain."""
        found = []
        for kernels in (REFERENCES, device_kernels()):
            self.start(kernels)
            for lengths in CASES:
                self.come_to_cut(config, lengths)
                self.make()
                found.append(self.retained())
        references, ours = torch.cat(found[: len(CASES)]), torch.cat(found[len(CASES) :])
        return torch.isin(references, ours).double().mean().item()

    def measure(
        self, config: EvictionConfig, lengths: Sequence[int], rounds: int
    ) -> dict[str, Any]:
        """Makes a kind of cut again and again.

        Args:
            config: The requests' settings.
            lengths: Tokens of each request that is due.
            rounds: Cuts that are timed; the median.
        """

        def prepare() -> None:
            self.come_to_cut(config, lengths)

        prepare()
        mib = most_taken(self.make)
        host = host_time(self.make, rounds, prepare)
        device = median_time(self.make, rounds, prepare=prepare, seconds_queued=2 * host)
        prepare()
        did = profiled(self.make)
        return {
            "device_ms": 1e3 * device,
            "busy_ms": sum(us for _, us in did.values()) / 1e3,
            "host_ms": 1e3 * host,
            "launches": sum(number for number, _ in did.values()),
            "mib": mib,
            "kernels": did,
        }

    def retained(self) -> torch.Tensor:
        """What the last cuts left in packed blocks: a number for each entry, `[n]` int64."""
        found = []
        for cache in self.memory.chunk(self.num_layers):
            for request in self.due:
                bits = cache[request.progress.swap.fresh].view(torch.int16).long().flatten(0, 2)
                weights = torch.arange(1, bits.shape[1] + 1, device=DEVICE).square()
                found.append((bits * weights).sum(-1))
        return torch.cat(found).cpu()


def device_kernels() -> Any:
    """What computes a cut here; the references without a card."""
    if HAS_CARD:
        from vllm_kvselect.kernels import cuda

        return cuda.KERNELS
    return REFERENCES


def most_taken(run: Any) -> float:
    """MiB that a call takes at once at most; without a card 0."""
    if not HAS_CARD:
        run()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def profiled(run: Any) -> dict[str, list[float]]:
    """How often the device did what in a call, and for how many us; without a card nothing."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not HAS_CARD:
        run()
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(OVERHEADS):
            number, us = times.get(event.name[:60], [0, 0.0])
            times[event.name[:60]] = [number + 1, us + event.time_range.elapsed_us()]
    return dict(sorted(times.items(), key=lambda item: -item[1][1]))


if __name__ == "__main__":
    run_child(make_ready)
