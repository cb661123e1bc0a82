"""What workers and scheduler say of a step, on its way to the front end.

It travels where vLLM carries telemetry of KV connectors, from `ModelRunnerOutput` to
`SchedulerStats`: connectors are refused with eviction, so nothing else uses it.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_kvselect.config import CONFIG_KEY

_CONTEXTS = f"{CONFIG_KEY}_contexts"


@dataclass
class StepReport:
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

    def as_connector_output(self) -> KVConnectorOutput:
        """The report in the envelope in which vLLM's scheduler passes it on."""
        return KVConnectorOutput(kv_connector_stats=KVConnectorStats({CONFIG_KEY: asdict(self)}))

    @classmethod
    def of(cls, output: ModelRunnerOutput) -> "StepReport | None":
        """The report that travels with a step's output, if there is one."""
        envelope = output.kv_connector_output
        stats = envelope.kv_connector_stats if envelope is not None else None
        found = stats.data.get(CONFIG_KEY) if stats is not None else None
        return None if found is None else cls(**found)

    @classmethod
    def take(cls, stats: SchedulerStats) -> "StepReport | None":
        """Takes the report out of a step's statistics."""
        found = _take(stats, CONFIG_KEY)
        return None if found is None else cls(**found)


@dataclass
class ContextReport:
    """What the scheduler says of compressed contexts: by how much each number has grown.

    Attributes:
        num_contexts: Contexts that a request would find.
        num_blocks: Blocks that they take.
    """

    num_contexts: int
    num_blocks: int

    def add_to(self, stats: SchedulerStats) -> None:
        """Sends the report along with a step's statistics."""
        stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _CONTEXTS: asdict(self)}

    @classmethod
    def take(cls, stats: SchedulerStats) -> "ContextReport | None":
        """Takes the report out of a step's statistics."""
        found = _take(stats, _CONTEXTS)
        return None if found is None else cls(**found)


def _take(stats: SchedulerStats, key: str) -> dict[str, Any] | None:
    """Takes something out; vLLM's own loggers would take it for a connector's."""
    found = stats.kv_connector_stats
    if not found or key not in found:
        return None
    stats.kv_connector_stats = {name: part for name, part in found.items() if name != key} or None
    part: dict[str, Any] = found[key]
    return part
