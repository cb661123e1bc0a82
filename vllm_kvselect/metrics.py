"""METRICS: what a server says of eviction on `/metrics`, one entry each.

The engine fills them from what is reported of each step; documentation and `top` read them here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

PREFIX = "vllm:kv_eviction_"


@dataclass
class Step:
    """What a worker did in one step; plain values, since it crosses processes.

    Attributes:
        prompts: `[prompt length in tokens, blocks freed, pages dropped of each head]` of each
            prompt packed for the first time, cuts in it included.
        in_prompts: Blocks freed at each cut in a prompt before its last one; those that a preempted
            request makes again are left out.
        rounds: `[blocks freed, pages dropped of each head]` in each round, likewise.
        contexts: `[tokens found, blocks dropped]` of each request that found its context.
        selection_seconds: Time spent scoring, selecting and packing, in all layers, since the last
            report; rounds included, and prompts that ended before they were packed.
        num_more_saved: Blocks that live requests would hold as well, had nothing been dropped: how
            many more than at the last report, below 0 for fewer.
        plans: Fingerprint of the plan of each request that began, by its id, where the integrity
            check compares them with the scheduler's.
        loads: Whether stored contexts are in their blocks now, by the number of the load.
        num_stored: Contexts that were stored since the last report.
        num_not_stored: Contexts that could not be.
    """

    prompts: list[list[int]]
    in_prompts: list[int]
    rounds: list[list[int]]
    contexts: list[list[int]]
    selection_seconds: float
    num_more_saved: int
    plans: dict[str, str] = field(default_factory=dict)
    loads: dict[int, bool] = field(default_factory=dict)
    num_stored: int = 0
    num_not_stored: int = 0


@dataclass
class States:
    """What the scheduler says of states: by how much each number has grown."""

    num_states: int
    num_blocks: int


class Sizes(NamedTuple):
    """What counts are multiplied by: a page's tokens, and its entries in all layers and heads."""

    page: int
    page_entries: int
    block_bytes: int


@dataclass(frozen=True)
class Metric:
    """A metric, without vLLM's prefix.

    Attributes:
        help: What it says.
        value: By how much the report raises it; of a histogram, the values that it observes.
        kind: How it counts: upwards, up and down, or each value into a bucket.
        of: Of which report it is; None where nobody reports it.
        buckets: Upper ends of a histogram's buckets.
    """

    help: str
    value: Callable[[Any, Sizes], Any] = lambda *_: 0
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    of: type[Step | States] | None = Step
    buckets: tuple[float, ...] = ()

    def sample(self, name: str) -> str:
        """What `/metrics` calls it; of a histogram the sum of what was observed."""
        return (
            f"{PREFIX}{name}{ {'counter': '_total', 'gauge': '', 'histogram': '_sum'}[self.kind] }"
        )


METRICS: dict[str, Metric] = {
    "requests": Metric(
        "Requests whose prompts had entries dropped.", lambda step, _: len(step.prompts)
    ),
    "dropped_entries": Metric(
        "Entries dropped: one token of one KV head of one layer.",
        lambda step, sizes: sizes.page_entries * sum(pages for *_, pages in step.prompts),
    ),
    "freed_blocks": Metric(
        "Blocks given back once prompts were packed.",
        lambda step, _: sum(blocks for _, blocks, _ in step.prompts),
    ),
    "freed_bytes": Metric(
        "Bytes of the blocks given back.",
        lambda step, sizes: sizes.block_bytes * sum(blocks for _, blocks, _ in step.prompts),
    ),
    "prompt_cuts": Metric(
        "Cuts made in prompts before their end.", lambda step, _: len(step.in_prompts)
    ),
    "prompt_freed_blocks": Metric(
        "Blocks of prompts given back before these were complete; freed_blocks has them again.",
        lambda step, _: sum(step.in_prompts),
    ),
    "rounds": Metric(
        "Rounds in which entries of requests that generate were dropped.",
        lambda step, _: len(step.rounds),
    ),
    "round_dropped_entries": Metric(
        "Entries dropped in rounds.",
        lambda step, sizes: sizes.page_entries * sum(pages for _, pages in step.rounds),
    ),
    "round_freed_blocks": Metric(
        "Blocks given back in rounds.", lambda step, _: sum(blocks for blocks, _ in step.rounds)
    ),
    "state_hits": Metric(
        "Requests that went on from what others, or they, had compressed.",
        lambda step, _: len(step.contexts),
    ),
    "state_tokens": Metric(
        "Tokens that these requests did not have to compute.",
        lambda step, _: sum(tokens for tokens, _ in step.contexts),
    ),
    "state_blocks": Metric(
        "Blocks that had been dropped of what they found.",
        lambda step, _: sum(blocks for _, blocks in step.contexts),
    ),
    "states": Metric(
        "Compressed beginnings of prompts that a request would find.",
        lambda held, _: held.num_states,
        kind="gauge",
        of=States,
    ),
    "state_held_bytes": Metric(
        "Bytes of the blocks that these take.",
        lambda held, sizes: held.num_blocks * sizes.block_bytes,
        kind="gauge",
        of=States,
    ),
    "loaded_contexts": Metric(
        "Contexts read from the folder.", lambda step, _: sum(step.loads.values())
    ),
    "not_loaded_contexts": Metric(
        "Contexts whose file was not used.",
        lambda step, _: sum(not is_whole for is_whole in step.loads.values()),
    ),
    "stored_contexts": Metric("Contexts written to the folder.", lambda step, _: step.num_stored),
    "not_stored_contexts": Metric(
        "Contexts that could not be.", lambda step, _: step.num_not_stored
    ),
    "retained_ratio": Metric(
        "Entries retained of a prompt over all of its entries, of prompts that had some dropped.",
        lambda step, sizes: [1 - pages * sizes.page / tokens for tokens, _, pages in step.prompts],
        kind="histogram",
        buckets=(0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    ),
    "selection_seconds": Metric(
        "Seconds that scoring, selecting and packing took for the prompts completed in a step and "
        "for rounds, prompts that ended before they were packed included.",
        lambda step, _: [step.selection_seconds] if step.selection_seconds else [],
        kind="histogram",
        buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    ),
    "saved_blocks": Metric(
        "Blocks that the running requests would hold in addition without eviction.",
        lambda step, _: step.num_more_saved,
        kind="gauge",
    ),
    "refusals": Metric("Requests refused for their eviction settings, by reason.", of=None),
}
"""By name."""
