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

from vllm_kvselect.engine.frontend.arguments import server_config
from vllm_kvselect.engine.platforms import block_size_of, page_size_of
from vllm_kvselect.engine.report import ContextReport, StepReport
from vllm_kvselect.engine.start_up import block_bytes, block_entries
from vllm_kvselect.request import REFUSAL_REASONS, RefusalReason

_RATIOS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class EvictionStatLogger(AggregateStatLoggerBase):
    """Turns the reports of the workers into Prometheus metrics with vLLM's names and labels.

    Of several front ends each gets some of an engine's reports, in no order among them. So reports
    say by how much something has changed, and what front ends have counted is summed. A single one
    also hears that nobody is served any more: offline no step follows in which workers would say
    what that leaves.

    Args:
        vllm_config: vLLM's configuration.
        engine_indexes: Engines whose reports come to this front end.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        model = vllm_config.model_config
        self._page_size = page_size_of(vllm_config)
        num_pages = block_size_of(vllm_config) // self._page_size
        self._entries_per_page = block_entries(vllm_config) // num_pages
        self._bytes_per_block = block_bytes(vllm_config)
        self._is_single = vllm_config.parallel_config._api_process_count == 1
        self._num_saved = dict.fromkeys(engine_indexes, 0)
        labels = {index: [model.served_model_name, str(index)] for index in engine_indexes}

        def make(kind: Any, name: str, text: str, **settings: Any) -> Any:
            metric = kind(f"vllm:kv_eviction_{name}", text, ["model_name", "engine"], **settings)
            return create_metric_per_engine(metric, labels)

        self._requests = make(Counter, "requests", "Requests whose prompts had entries dropped.")
        self._entries = make(
            Counter, "dropped_entries", "Entries dropped: one token of one KV head of one layer."
        )
        self._blocks = make(Counter, "freed_blocks", "Blocks given back once prompts were packed.")
        self._bytes = make(Counter, "freed_bytes", "Bytes of the blocks given back.")
        self._prompt_cuts = make(Counter, "prompt_cuts", "Cuts made in prompts before their end.")
        self._prompt_blocks = make(
            Counter,
            "prompt_freed_blocks",
            "Blocks of prompts given back before these were complete; freed_blocks has them again.",
        )
        self._rounds = make(
            Counter, "rounds", "Rounds in which entries of requests that generate were dropped."
        )
        self._round_entries = make(Counter, "round_dropped_entries", "Entries dropped in rounds.")
        self._round_blocks = make(Counter, "round_freed_blocks", "Blocks given back in rounds.")
        self._context_hits = make(
            Counter, "context_hits", "Requests that found their context compressed."
        )
        self._context_tokens = make(
            Counter, "context_tokens", "Tokens that these requests did not have to compute."
        )
        self._context_blocks = make(
            Counter, "context_blocks", "Blocks that had been dropped of what they found."
        )
        self._contexts = make(
            Gauge,
            "contexts",
            "Compressed contexts that a request would find.",
            multiprocess_mode="sum",
        )
        self._held_bytes = make(
            Gauge,
            "context_held_bytes",
            "Bytes of the blocks that these contexts take.",
            multiprocess_mode="sum",
        )
        self._loaded = make(Counter, "loaded_contexts", "Contexts read from the folder.")
        self._not_loaded = make(Counter, "not_loaded_contexts", "Contexts whose file was not used.")
        self._stored = make(Counter, "stored_contexts", "Contexts written to the folder.")
        self._not_stored = make(Counter, "not_stored_contexts", "Contexts that could not be.")
        self._ratios = make(
            Histogram,
            "retained_ratio",
            "Entries retained of a prompt over all of its entries, of prompts that had some "
            "dropped.",
            buckets=_RATIOS,
        )
        self._seconds = make(
            Histogram,
            "selection_seconds",
            "Seconds that scoring, selecting and packing took for the prompts completed in a step "
            "and for rounds, prompts that ended before they were packed included.",
            buckets=_SECONDS,
        )
        self._saved = make(
            Gauge,
            "saved_blocks",
            "Blocks that the running requests would hold in addition without eviction.",
            multiprocess_mode="sum",
        )
        refusals = Counter(
            "vllm:kv_eviction_refusals",
            "Requests refused for their eviction settings, by reason.",
            ["model_name", "reason"],
        )
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
        if (held := ContextReport.take(scheduler_stats)) is not None:
            self._contexts[engine_idx].inc(held.num_contexts)
            self._held_bytes[engine_idx].inc(held.num_blocks * self._bytes_per_block)
        if (report := StepReport.take(scheduler_stats)) is not None:
            self._record(report, engine_idx)
        is_idle = not (scheduler_stats.num_running_reqs or scheduler_stats.num_waiting_reqs)
        if self._is_single:
            self._saved[engine_idx].set(0 if is_idle else self._num_saved[engine_idx])

    def _record(self, report: StepReport, engine_idx: int) -> None:
        for num_prompt_tokens, num_blocks, num_pages in report.prompts:
            self._requests[engine_idx].inc()
            self._entries[engine_idx].inc(num_pages * self._entries_per_page)
            self._blocks[engine_idx].inc(num_blocks)
            self._bytes[engine_idx].inc(num_blocks * self._bytes_per_block)
            num_dropped = num_pages * self._page_size
            self._ratios[engine_idx].observe(1 - num_dropped / num_prompt_tokens)
        for num_blocks in report.in_prompts:
            self._prompt_cuts[engine_idx].inc()
            self._prompt_blocks[engine_idx].inc(num_blocks)
        for num_blocks, num_pages in report.rounds:
            self._rounds[engine_idx].inc()
            self._round_entries[engine_idx].inc(num_pages * self._entries_per_page)
            self._round_blocks[engine_idx].inc(num_blocks)
        for num_tokens, num_blocks in report.contexts:
            self._context_hits[engine_idx].inc()
            self._context_tokens[engine_idx].inc(num_tokens)
            self._context_blocks[engine_idx].inc(num_blocks)
        for is_whole in report.loads.values():
            (self._loaded if is_whole else self._not_loaded)[engine_idx].inc()
        self._stored[engine_idx].inc(report.num_stored)
        self._not_stored[engine_idx].inc(report.num_not_stored)
        if report.selection_seconds:
            self._seconds[engine_idx].observe(report.selection_seconds)
        self._num_saved[engine_idx] += report.num_more_saved
        self._saved[engine_idx].inc(report.num_more_saved)

    def record_refusal(self, reason: RefusalReason) -> None:
        """Counts a request that was refused before it reached an engine."""
        self._refusals[reason].inc()

    def log_engine_initialized(self) -> None:
        """Nothing to say: the engine logged its plan at start-up."""


def stat_logger(vllm_config: VllmConfig, engine_indexes: list[int]) -> EvictionStatLogger | None:
    """The logger of an engine, or None for a stock one."""
    if server_config(vllm_config) is None:
        return None
    return EvictionStatLogger(vllm_config, engine_indexes)
