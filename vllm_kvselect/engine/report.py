"""What a worker says of a step, on its way to the front end.

It travels where vLLM carries telemetry of KV connectors, from `ModelRunnerOutput` to
`SchedulerStats`: connectors are refused with eviction, so nothing else uses it.
"""

from dataclasses import asdict, dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput

from vllm_kvselect.config import CONFIG_KEY


@dataclass
class StepReport:
    """What a worker did in one step; plain values, since it crosses processes.

    Attributes:
        prompts: `[prompt length in tokens, blocks freed]` of each prompt packed for the first time.
        selection_seconds: Time spent scoring, selecting and packing, in all layers, since the last
            report; also for prompts that ended before they were packed.
        num_saved_blocks: Blocks that live requests would hold as well, had nothing been dropped.
    """

    prompts: list[list[int]]
    selection_seconds: float
    num_saved_blocks: int

    def as_connector_output(self) -> KVConnectorOutput:
        """The report in the envelope in which vLLM's scheduler passes it on."""
        return KVConnectorOutput(kv_connector_stats=KVConnectorStats({CONFIG_KEY: asdict(self)}))

    @classmethod
    def take(cls, stats: SchedulerStats) -> "StepReport | None":
        """Takes the report out of a step's statistics.

        vLLM's own loggers would take what they find there for a connector's.
        """
        found = stats.kv_connector_stats
        if not found or CONFIG_KEY not in found:
            return None
        stats.kv_connector_stats = None
        return cls(**found[CONFIG_KEY])
