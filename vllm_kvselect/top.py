"""`vllm-kvselect top`: a small view of a running server, from its `/metrics`."""

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_TIMEOUT = 10.0
_BAR_WIDTH = 40


class TopError(RuntimeError):
    """The server cannot be watched: says why and what to do."""


@dataclass(frozen=True)
class Snapshot:
    """What a server's metrics say at one moment, summed over its engines.

    Attributes:
        num_blocks: Blocks of the pool, without the null block.
        num_used: Blocks in use.
        num_saved: Blocks that the running requests would hold as well without eviction.
        num_running: Requests running.
        num_waiting: Requests waiting.
        num_answered: Requests that ended since the start.
        num_evicted: Requests evicted since the start.
        num_freed: Blocks freed since the start.
        num_freed_bytes: Bytes of them.
        num_refused: Requests refused for their eviction settings since the start.
        num_prompt_cuts: Cuts made in prompts before their end, since the start.
        num_prompt_blocks: Blocks that these freed.
        num_rounds: Rounds made while requests generated, since the start.
        num_round_blocks: Blocks freed in them.
        num_contexts: Compressed contexts that are held.
        num_context_bytes: Bytes of them.
        num_context_hits: Requests that found their context compressed since the start.
        num_context_tokens: Tokens that these did not have to compute.
        num_context_blocks: Blocks that had been dropped of what they found.
        selection_seconds: Time spent selecting and packing since the start.
        evicts: Whether the server has the metrics of eviction at all.
        model: Name of the model that is served.
        block_size: Tokens per block.
    """

    num_blocks: int
    num_used: int
    num_saved: int
    num_running: int
    num_waiting: int
    num_answered: int
    num_evicted: int
    num_freed: int
    num_freed_bytes: int
    num_refused: int
    num_prompt_cuts: int
    num_prompt_blocks: int
    num_rounds: int
    num_round_blocks: int
    num_contexts: int
    num_context_bytes: int
    num_context_hits: int
    num_context_tokens: int
    num_context_blocks: int
    selection_seconds: float
    evicts: bool
    model: str
    block_size: int

    @property
    def num_needed(self) -> int:
        """Blocks that the running requests would need with the full cache."""
        return self.num_used + self.num_saved

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Reads the Prometheus text format.

        Args:
            text: Body of `/metrics`.

        Returns:
            The snapshot.

        Raises:
            TopError: If these are not the metrics of a vLLM server.
        """
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

        def total(name: str) -> float:
            return sum(sample.value for sample in samples if sample.name == f"vllm:{name}")

        caches = [sample.labels for sample in samples if sample.name == "vllm:cache_config_info"]
        pools = {labels["engine"]: int(labels["num_gpu_blocks"]) - 1 for labels in caches}
        if not pools:
            raise TopError("there are no metrics of vLLM here; see that the URL is a vLLM server's")
        used = sum(
            round(sample.value * pools[sample.labels["engine"]])
            for sample in samples
            if sample.name == "vllm:kv_cache_usage_perc"
        )
        return cls(
            num_blocks=sum(pools.values()),
            num_used=used,
            num_saved=int(total("kv_eviction_saved_blocks")),
            num_running=int(total("num_requests_running")),
            num_waiting=int(total("num_requests_waiting")),
            num_answered=int(total("request_success_total")),
            num_evicted=int(total("kv_eviction_requests_total")),
            num_freed=int(total("kv_eviction_freed_blocks_total")),
            num_freed_bytes=int(total("kv_eviction_freed_bytes_total")),
            num_refused=int(total("kv_eviction_refusals_total")),
            num_prompt_cuts=int(total("kv_eviction_prompt_cuts_total")),
            num_prompt_blocks=int(total("kv_eviction_prompt_freed_blocks_total")),
            num_rounds=int(total("kv_eviction_rounds_total")),
            num_round_blocks=int(total("kv_eviction_round_freed_blocks_total")),
            num_contexts=int(total("kv_eviction_contexts")),
            num_context_bytes=int(total("kv_eviction_context_held_bytes")),
            num_context_hits=int(total("kv_eviction_context_hits_total")),
            num_context_tokens=int(total("kv_eviction_context_tokens_total")),
            num_context_blocks=int(total("kv_eviction_context_blocks_total")),
            selection_seconds=total("kv_eviction_selection_seconds_sum"),
            evicts=any(sample.name.startswith("vllm:kv_eviction_") for sample in samples),
            model=", ".join(sorted(_labels(samples, "model_name"))),
            block_size=int(caches[0]["block_size"]),
        )

    @classmethod
    def fetch(cls, url: str) -> "Snapshot":
        """Asks a server.

        Args:
            url: The server's address, such as `http://localhost:8000`.

        Returns:
            The snapshot.

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


def _labels(samples: list[Sample], name: str) -> set[str]:
    """Values that a label has in vLLM's metrics."""
    ours = (sample.labels for sample in samples if sample.name.startswith("vllm:"))
    return {labels[name] for labels in ours if name in labels}


def render(snapshot: Snapshot, url: str) -> RenderableType:
    """Draws a snapshot.

    Args:
        snapshot: What to draw.
        url: The server's address.

    Returns:
        Something that rich prints.
    """
    scale = max(snapshot.num_blocks, snapshot.num_needed)
    blocks = Table.grid(padding=(0, 2))
    for name, number, color in (
        ("blocks used", snapshot.num_used, "green"),
        ("blocks saved", snapshot.num_saved, "cyan"),
        ("full cache", snapshot.num_needed, "yellow"),
        ("pool", snapshot.num_blocks, "white"),
    ):
        bar = Bar(max(scale, 1), 0, number, width=_BAR_WIDTH, color=color)
        share = f"{100 * number / snapshot.num_blocks:.0f} % of the pool"
        blocks.add_row(name, Text(str(number), justify="right"), bar, share)
    requests = (
        f"requests      {snapshot.num_running} running, {snapshot.num_waiting} waiting; "
        f"{snapshot.num_evicted} evicted, {snapshot.num_refused} refused since the start"
    )
    freed = (
        f"since start   {snapshot.num_freed} blocks freed "
        f"({snapshot.num_freed_bytes / 2**20:.1f} MiB), {snapshot.selection_seconds:.2f} s spent "
        "selecting"
    )
    contexts = (
        f"contexts      {snapshot.num_contexts} held ({snapshot.num_context_bytes / 2**20:.1f} "
        f"MiB); since the start {snapshot.num_context_hits} requests found theirs, "
        f"{snapshot.num_context_tokens} tokens not prefilled"
    )
    lines = [requests, freed]
    if snapshot.num_prompt_cuts:
        lines.append(
            f"in prompts    {snapshot.num_prompt_cuts} cuts since the start, "
            f"{snapshot.num_prompt_blocks} blocks freed before the prompts' ends"
        )
    if snapshot.num_rounds:
        lines.append(
            f"rounds        {snapshot.num_rounds} since the start, {snapshot.num_round_blocks} "
            "blocks freed"
        )
    if snapshot.num_contexts or snapshot.num_context_hits:
        lines.append(contexts)
    if not snapshot.evicts:
        lines = [requests.split(";")[0], "This server runs without --kv-eviction."]
    title = Text.assemble(("vllm-kvselect top", "bold"), f"   {snapshot.model} at {url}")
    return Group(title, "", blocks, *lines)


def watch(url: str, interval: float, console: Console) -> None:
    """Draws a server's snapshots until it is interrupted.

    Args:
        url: The server's address.
        interval: Seconds between snapshots.
        console: Where to draw.

    Raises:
        TopError: If the server does not answer, or stops to.
    """

    def frame() -> RenderableType:
        return Group(render(Snapshot.fetch(url), url), "", f"Every {interval:g} s; Ctrl+C leaves.")

    with Live(frame(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(frame(), refresh=True)
