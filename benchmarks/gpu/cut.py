"""Cuts on a GPU, as a worker makes them between two steps: what they take of device and host.

Attention layers of vLLM in the shape of an 8B Llama, with our backend, the model's rotation, and a
random W_O and probe each, over a cache of random entries. No model is loaded, nothing is attended
to. All requests come to the end of their prompts at once.

The device's time is from the first launch to the last, while launches are queued behind a wait, as
far as its queue holds them; busy is the sum of what it did. The host's is from the call to its
return. Launches are what the device did: kernels, copies, fills.
"""

import json
import sys
import tempfile
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _device import DEVICE, HAS_CARD, host_time, row
from _models import LLAMA_8B, TINY, write
from _timing import median_time

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.tables import console
from vllm_kvselect.registry import METHODS

CUTS = ("layer-probe", "adakv-perturb", "layer-defensivekv", "snapkv", "layer-keydiff")
LENGTH, BUDGET = 4096, 0.125
DRY_LENGTH, DRY_BUDGET = 160, 0.6
OVERHEADS = ("Activity Buffer", "Command Buffer", "Lazy Function", "Runtime Triggered", "Sync")
"""What a profile says of itself, beside what the device did."""


def main(
    methods: Annotated[str, typer.Option(help="Methods.")] = ",".join(CUTS),
    requests: Annotated[str, typer.Option(help="Requests that are due at once.")] = "1,8",
    length: Annotated[int, typer.Option(help="Tokens of each.")] = LENGTH,
    budget: Annotated[float, typer.Option(help="Fraction of the tokens.")] = BUDGET,
    rounds: Annotated[int, typer.Option(min=1, help="Cuts of each kind; the median.")] = 5,
    retained: Annotated[
        Path | None,
        typer.Option(help="Notes what is retained; if the file is there, how much is the same."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on any device.")] = False,
) -> None:
    """Makes every kind of cut and prints a table and one JSON line."""
    if dry_run:
        length, budget, rounds, requests = DRY_LENGTH, DRY_BUDGET, 1, "1,2"
    elif not HAS_CARD:
        raise typer.BadParameter("there is no GPU")
    counts, found, failed = [*map(int, requests.split(","))], [], []
    if unknown := {*methods.split(",")} - METHODS.keys():
        raise typer.BadParameter(f"unknown methods {sorted(unknown)}")
    known = torch.load(retained) if retained is not None and retained.exists() else {}
    noted: dict[str, torch.Tensor] = {}
    columns = ("device_ms", "busy_ms", "host_ms", "launches", "mib")
    table = Table("method", "requests", *columns)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write(folder, LLAMA_8B if HAS_CARD else TINY)
        layers = Layers(folder, length, max(counts))
        for method in methods.split(","):
            config = settings(method, budget)
            for count in counts:
                name = f"{method}, {count} at once"
                try:
                    case = layers.measure(config, count, rounds)
                except Exception as error:  # whatever it is, other methods are timed all the same
                    failed.append(name)
                    row(f"a cut after {length} tokens, {name}", f"failed: {error!r:.300}")
                    continue
                entries = layers.retained()
                if name in known:
                    case["same"] = torch.isin(known[name], entries).double().mean().item()
                noted[name] = entries
                found.append({"method": method, "requests": count, **case})
                row(f"a cut after {length} tokens, {name}", said(case))
                table.add_row(method, str(count), *(f"{case[each]:.5g}" for each in columns))
    if retained is not None and not known:
        torch.save(noted, retained)
    console().print(table)
    print(json.dumps({"length": length, "budget": budget, "cuts": found}))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def said(case: dict[str, Any]) -> str:
    """A kind of cut in words."""
    text = (
        f"device {case['device_ms']:.2f} ms, busy {case['busy_ms']:.2f} ms, "
        f"host {case['host_ms']:.2f} ms, {case['launches']} launches, "
        f"{case['mib']:.0f} MiB beside the cache"
    )
    return f"{text}, {case['same']:.4%} of the noted entries" if "same" in case else text


def settings(method: str, budget: float) -> EvictionConfig:
    """A server's configuration whose cuts are made between two steps."""
    given: dict[str, Any] = {"method": method, "budget": budget}
    if "cut_at_once" in EvictionConfig.model_fields:  # else there are no others
        given["cut_at_once"] = False
    return EvictionConfig.parse(given)


def make(due: Any, requests: list[Any]) -> None:
    """Makes the cuts that are due: together, or one by one where that is all there is."""
    if "request" in signature(due.make).parameters:
        for request in requests:
            due.make(request)
    else:
        due.make(requests)


class Layers:
    """All attention layers of a model, their cache and what they are bound to, without the model.

    Args:
        folder: The model's config.
        length: Tokens of a request.
        most: Requests that are due at once, at most.
        backend: Attention backend; that of the platform if left out.
        kernels: What computes a cut; the device's if left out.
    """

    def __init__(
        self, folder: str, length: int, most: int, backend: Any = None, kernels: Any = None
    ) -> None:
        # They load vLLM.
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.import_utils import resolve_obj_by_qualname

        from vllm_kvselect.engine.platforms import platform
        from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec

        here = platform()
        assert here is not None
        backend = backend or resolve_obj_by_qualname(next(iter(here.backends.values())))
        self.length, self.block_size = length, here.page_size
        blocks_each = -(-length // self.block_size)
        config = EngineArgs(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16" if HAS_CARD else "float32",
            block_size=self.block_size,
            max_model_len=length + 1,
            max_num_seqs=most,
        ).create_engine_config()
        model, parallel = config.model_config, config.parallel_config
        self.num_layers = model.get_num_layers(parallel)
        self.num_heads = model.get_num_attention_heads(parallel)
        self.num_kv_heads = model.get_num_kv_heads(parallel)
        self.head_size, self.hidden_size = model.get_head_size(), model.get_hidden_size()
        self.dtype, self.window = model.dtype, EvictionConfig(method="adakv-perturb").window
        self.random = torch.Generator(DEVICE).manual_seed(0)
        num_blocks = 1 + most * blocks_each
        shape = self.num_layers * num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size
        self.memory = torch.empty(shape, dtype=self.dtype, device=DEVICE)
        for cache in self.memory.chunk(self.num_layers):
            # Entries differ in strength, as real ones do.
            strength = self._randn(*cache.shape[:3], 1).square_()
            cache.copy_(self._randn(*cache.shape).mul_(strength))
        self._as_it_was = self.memory.clone()
        shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.blocks = shuffled.view(most, blocks_each).tolist()
        names = [f"layers.{index}.attn" for index in range(self.num_layers)]
        with set_current_vllm_config(config), torch.device(DEVICE):
            self.layers = [self._layer(name, config, backend) for name in names]
            self._bind()
            spec = HeadwiseSpec(
                block_size=self.block_size,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype=self.dtype,
                eviction=settings(CUTS[0], BUDGET),
            )
            self.builder = backend.get_builder_cls()(spec, names, config, torch.device(DEVICE))
            self.state = self.builder.start(lambda _: [], kernels or device_kernels())
        query = self.num_heads, self.head_size
        self.queries = self._randn(self.num_layers, most * self.window, *query)
        self.due: list[Any] = []

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

    def _bind(self) -> None:
        """Gives layers their caches and what methods need: each a part of one piece of memory."""
        from vllm_kvselect.scoring.probe import num_features
        from vllm_kvselect.scoring.rotation import Rotation
        from vllm_kvselect.scoring.value_norms import OutputProjection

        exponents = torch.arange(0, self.head_size, 2, device=DEVICE) / self.head_size
        angles = torch.arange(self.length, device=DEVICE)[:, None] * 500000.0**-exponents
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

    def come_to_cut(self, config: EvictionConfig, count: int) -> None:
        """Puts requests before their cut, and the cache as it was before any."""
        from vllm_kvselect.engine.drop.request import Request
        from vllm_kvselect.planning.plan import plan
        from vllm_kvselect.scoring.memory import StepQueries

        self.memory.copy_(self._as_it_was)
        made = plan(config, None, None, self.length, self.block_size)
        seen = StepQueries(slice(None), self.num_layers)
        seen.take(self.queries)
        self.due = [Request(made) for _ in range(count)]
        for index, request in enumerate(self.due):
            cut = made.cuts[0]
            request.num_computed, request.progress.block_ids = cut.position, self.blocks[index]
            if (first := request.first_query(cut)) < cut.position:
                place = index * self.window
                request.progress.queries.keep(seen, place, first, cut.position)

    def measure(self, config: EvictionConfig, count: int, rounds: int) -> dict[str, Any]:
        """Makes a kind of cut again and again.

        Args:
            config: The requests' settings.
            count: Requests that are due at once.
            rounds: Cuts that are timed; the median.
        """

        def prepare() -> None:
            self.come_to_cut(config, count)

        def cut() -> None:
            make(self.builder.due, self.due)

        prepare()
        cut()  # compiles kernels
        if any(request.next_cut is not None for request in self.due):
            raise RuntimeError("no cut was made")
        prepare()
        mib = most_taken(cut)
        host = host_time(cut, rounds, prepare)
        device = median_time(cut, rounds, prepare=prepare, seconds_queued=2 * host)
        prepare()
        did = profiled(cut)
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
        cut, found = self.due[0].plan.cuts[0], []
        for cache in self.memory.chunk(self.num_layers):
            for request in self.due:
                packed = request.progress.block_ids[cut.first_packed : cut.tail_start]
                bits = cache[packed].view(torch.int16).long().flatten(0, 2)
                weights = torch.arange(1, bits.shape[1] + 1, device=DEVICE).square()
                found.append((bits * weights).sum(-1))
        return torch.cat(found).cpu()


def device_kernels() -> Any:
    """What computes a cut here; the references without a card."""
    if HAS_CARD:
        from vllm_kvselect.kernels import cuda

        return cuda.KERNELS
    from vllm_kvselect.kernels.base import REFERENCES

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
    typer.run(main)
