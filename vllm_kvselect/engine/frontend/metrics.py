"""What eviction did, from the workers to vLLM's `/metrics`.

A worker reports what it packed in a step (`report.py`). `EvictionStatLogger` takes the report out
of vLLM's statistics in the front end.
"""

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_kvselect.engine.frontend.arguments import requested
from vllm_kvselect.engine.platforms import block_size_of, page_size_of
from vllm_kvselect.engine.report import StatesReport, StepReport
from vllm_kvselect.engine.start_up import block_bytes, block_entries
from vllm_kvselect.metrics import METRICS, PREFIX, Sizes
from vllm_kvselect.request import REFUSAL_REASONS, RefusalReason


class EvictionStatLogger(AggregateStatLoggerBase):
    """Turns the reports of the workers into Prometheus metrics with vLLM's names and labels.

    Of several front ends each gets some of an engine's reports, in no order among them. So reports
    say by how much something has changed, and what front ends have counted is summed. A single one
    also hears that nobody is served any more: offline no step follows in which workers would say
    what that leaves.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        model = vllm_config.model_config
        page_size = page_size_of(vllm_config)
        num_pages = block_size_of(vllm_config) // page_size
        self._sizes = Sizes(
            page_size, block_entries(vllm_config) // num_pages, block_bytes(vllm_config)
        )
        self._is_single = vllm_config.parallel_config._api_process_count == 1
        self._num_saved = dict.fromkeys(engine_indexes, 0)
        labels = {index: [model.served_model_name, str(index)] for index in engine_indexes}
        self._metrics = {
            name: create_metric_per_engine(_made(name, ["model_name", "engine"]), labels)
            for name, metric in METRICS.items()
            if metric.of is not None
        }
        refusals = _made("refusals", ["model_name", "reason"])
        self._refusals = {
            reason: refusals.labels(model.served_model_name, reason) for reason in REFUSAL_REASONS
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Records the reports of a step, if there are any."""
        if scheduler_stats is None:
            return
        if (held := StatesReport.take(scheduler_stats)) is not None:
            self._record(held, engine_idx)
        if (report := StepReport.take(scheduler_stats)) is not None:
            self._num_saved[engine_idx] += report.num_more_saved
            self._record(report, engine_idx)
        is_idle = not (scheduler_stats.num_running_reqs or scheduler_stats.num_waiting_reqs)
        if self._is_single:
            self._metrics["saved_blocks"][engine_idx].set(
                0 if is_idle else self._num_saved[engine_idx]
            )

    def _record(self, report: StepReport | StatesReport, engine_idx: int) -> None:
        for name, of_engines in self._metrics.items():
            metric = METRICS[name]
            if metric.of is None or not isinstance(report, metric.of):
                continue
            value = metric.value(report, self._sizes)
            if metric.kind != "histogram":
                of_engines[engine_idx].inc(value)
                continue
            for each in value:
                of_engines[engine_idx].observe(each)

    def record_refusal(self, reason: RefusalReason) -> None:
        """Counts a request that was refused before it reached an engine."""
        self._refusals[reason].inc()

    def log_engine_initialized(self) -> None:
        """Nothing to say: the engine logged its plan at start-up."""


def _made(name: str, labels: list[str]) -> Any:
    """A metric as Prometheus knows it."""
    metric = METRICS[name]
    given = f"{PREFIX}{name}", metric.help, labels
    if metric.kind == "counter":
        return Counter(*given)
    if metric.kind == "gauge":
        return Gauge(*given, multiprocess_mode="sum")
    return Histogram(*given, buckets=metric.buckets)


def stat_logger(vllm_config: VllmConfig, engine_indexes: list[int]) -> EvictionStatLogger | None:
    """The logger of an engine, or None for a stock one."""
    if requested(vllm_config) is None:
        return None
    return EvictionStatLogger(vllm_config, engine_indexes)
