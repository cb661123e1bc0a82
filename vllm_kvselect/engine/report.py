"""What workers and scheduler say of a step, on its way to the front end.

It travels where vLLM carries telemetry of KV connectors, from `ModelRunnerOutput` to
`SchedulerStats`: connectors are refused with eviction, so nothing else uses it.
"""

from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_kvselect.config import CONFIG_KEY
from vllm_kvselect.metrics import States, Step

_STATES = f"{CONFIG_KEY}_states"


class StepReport(Step):
    """What a worker says of a step, and how it travels."""

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


class StatesReport(States):
    """What the scheduler says of states, and how it travels."""

    def add_to(self, stats: SchedulerStats) -> None:
        """Sends the report along with a step's statistics."""
        stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _STATES: asdict(self)}

    @classmethod
    def take(cls, stats: SchedulerStats) -> "StatesReport | None":
        """Takes the report out of a step's statistics."""
        found = _take(stats, _STATES)
        return None if found is None else cls(**found)


def _take(stats: SchedulerStats, key: str) -> dict[str, Any] | None:
    """Takes something out; vLLM's own loggers would take it for a connector's."""
    found = stats.kv_connector_stats
    if not found or key not in found:
        return None
    stats.kv_connector_stats = {name: part for name, part in found.items() if name != key} or None
    return found[key]
