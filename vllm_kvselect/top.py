"""`vllm-kvselect top`: a small view of a running server, from its `/metrics`."""

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_kvselect.metrics import METRICS, PREFIX

_TIMEOUT = 10.0
_BAR_WIDTH = 40


class TopError(RuntimeError):
    """The server cannot be watched: says why and what to do."""


@dataclass(frozen=True)
class Snapshot:
    """What a server's metrics say at one moment, summed over its engines.

    Blocks are counted without the null block. `eviction` are its metrics by name, of histograms the
    sum of what was observed; a server that does not evict has none.
    """

    num_blocks: int
    num_used: int
    num_running: int
    num_waiting: int
    num_answered: int
    eviction: dict[str, float]
    evicts: bool
    model: str
    block_size: int

    @property
    def num_needed(self) -> int:
        """Blocks that the running requests would need with the full cache."""
        return self.num_used + int(self.eviction["saved_blocks"])

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Reads the Prometheus text format of `/metrics`.

        Raises:
            TopError: If these are not the metrics of a vLLM server.
        """
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

        def total(name: str) -> float:
            return sum(sample.value for sample in samples if sample.name == name)

        caches = [sample.labels for sample in samples if sample.name == "vllm:cache_config_info"]
        pools = {labels["engine"]: int(labels["num_gpu_blocks"]) - 1 for labels in caches}
        if not pools:
            raise TopError("there are no metrics of vLLM here; see that the URL is a vLLM server's")
        used = sum(
            round(sample.value * pools[sample.labels["engine"]])
            for sample in samples
            if sample.name == "vllm:kv_cache_usage_perc"
        )
        ours = [each.labels for each in samples if each.name.startswith("vllm:")]
        models = {labels["model_name"] for labels in ours if "model_name" in labels}
        return cls(
            num_blocks=sum(pools.values()),
            num_used=used,
            num_running=int(total("vllm:num_requests_running")),
            num_waiting=int(total("vllm:num_requests_waiting")),
            num_answered=int(total("vllm:request_success_total")),
            eviction={name: total(metric.sample(name)) for name, metric in METRICS.items()},
            evicts=any(sample.name.startswith(PREFIX) for sample in samples),
            model=", ".join(sorted(models)),
            block_size=int(caches[0]["block_size"]),
        )

    @classmethod
    def fetch(cls, url: str) -> "Snapshot":
        """Asks the server at an address such as `http://localhost:8000`.

        Raises:
            TopError: If the server does not answer, or is none of vLLM's.
        """
        try:
            text = _text(url, "metrics")
        except (OSError, ValueError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise TopError(
                f"{url} does not answer ({reason}); give the server's address with --url"
            ) from None
        try:
            return cls.parse(text)
        except TopError:
            if _is_vllm(url):
                raise TopError(
                    f"the server at {url} keeps no statistics; start it without --disable-log-stats"
                ) from None
            raise


def _text(url: str, path: str) -> str:
    with urllib.request.urlopen(f"{url.rstrip('/')}/{path}", timeout=_TIMEOUT) as response:
        body: bytes = response.read()
    return body.decode()


def _is_vllm(url: str) -> bool:
    """Whether a server says which version it is, as those of vLLM do."""
    try:
        said = json.loads(_text(url, "version"))
    except (OSError, ValueError, HTTPException):
        return False
    return isinstance(said, dict) and [*said] == ["version"]


def render(snapshot: Snapshot, url: str) -> RenderableType:
    """Draws a snapshot."""
    scale = max(snapshot.num_blocks, snapshot.num_needed)
    blocks = Table.grid(padding=(0, 2))
    for name, number, color in (
        ("blocks used", snapshot.num_used, "green"),
        ("blocks saved", snapshot.num_needed - snapshot.num_used, "cyan"),
        ("full cache", snapshot.num_needed, "yellow"),
        ("pool", snapshot.num_blocks, "white"),
    ):
        bar = Bar(max(scale, 1), 0, number, width=_BAR_WIDTH, color=color)
        share = f"{100 * number / snapshot.num_blocks:.0f} % of the pool"
        blocks.add_row(name, Text(str(number), justify="right"), bar, share)
    found = snapshot.eviction
    since = {name: int(value) for name, value in found.items()}
    freed, held = (found[name] / 2**20 for name in ("freed_bytes", "state_held_bytes"))
    requests = f"requests      {snapshot.num_running} running, {snapshot.num_waiting} waiting; "
    lines = [requests + "{requests} evicted, {refusals} refused since the start"]
    lines.append(
        f"since start   {{freed_blocks}} blocks freed ({freed:.1f} MiB), "
        f"{found['selection_seconds']:.2f} s spent selecting"
    )
    if since["prompt_cuts"]:
        lines.append(
            "in prompts    {prompt_cuts} cuts since the start, {prompt_freed_blocks} blocks freed "
            "before the prompts' ends"
        )
    if since["rounds"]:
        lines.append("rounds        {rounds} since the start, {round_freed_blocks} blocks freed")
    if since["states"] or since["state_hits"]:
        lines.append(
            f"states        {{states}} held ({held:.1f} MiB); since the start {{state_hits}} "
            "requests went on from one, {state_tokens} tokens not prefilled"
        )
    lines = [line.format_map(since) for line in lines]
    if not snapshot.evicts:
        lines = [requests.split(";")[0], "This server runs without --kv-eviction."]
    title = Text.assemble(("vllm-kvselect top", "bold"), f"   {snapshot.model} at {url}")
    return Group(title, "", blocks, *lines)


def watch(url: str, interval: float, console: Console) -> None:
    """Draws a server's snapshots until it is interrupted, with seconds between.

    Raises:
        TopError: If the server does not answer, or stops to.
    """

    def frame() -> RenderableType:
        return Group(render(Snapshot.fetch(url), url), "", f"Every {interval:g} s; Ctrl+C leaves.")

    with Live(frame(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(frame(), refresh=True)
