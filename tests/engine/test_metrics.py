"""Reports of workers on their way to Prometheus."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from vllm_kvselect.config import CONFIG_KEY
from vllm_kvselect.engine.frontend.metrics import stat_logger
from vllm_kvselect.engine.report import StatesReport, StepReport
from vllm_kvselect.tiny_model import tiny_model


def test_a_report_arrives_as_it_was_sent_and_only_once() -> None:
    report = StepReport([[1500, 9, 38]], [6, 6, 7], [[4, 16], [4, 17]], [[960, 20]], 0.25, 51)
    envelope = report.as_connector_output().kv_connector_stats
    assert envelope is not None
    stats = SchedulerStats(kv_connector_stats=envelope.to_dict())
    assert StepReport.take(stats) == report
    assert stats.kv_connector_stats is None  # vLLM's loggers would look for a connector
    assert StepReport.take(stats) is None


def test_statistics_of_others_stay_where_they_are() -> None:
    stats = SchedulerStats(kv_connector_stats={"bytes": 5})
    assert StepReport.take(stats) is None
    assert stats.kv_connector_stats == {"bytes": 5}


def test_two_reports_travel_together() -> None:
    worker, scheduler = StepReport([], [], [], [], 0.5, 0), StatesReport(2, 30)
    envelope = worker.as_connector_output().kv_connector_stats
    assert envelope is not None
    stats = SchedulerStats(kv_connector_stats=envelope.to_dict())
    scheduler.add_to(stats)
    assert StatesReport.take(stats) == scheduler
    assert StepReport.take(stats) == worker
    assert stats.kv_connector_stats is None


def test_gauges_do_not_depend_on_which_front_end_hears_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eviction = {"method": "snapkv", "budget": 256}
    config = EngineArgs(
        str(tiny_model()), max_model_len=2048, additional_config={CONFIG_KEY: eviction}
    ).create_engine_config()
    config.parallel_config._api_process_count = 2
    hearing = [0]  # the last one is the front end whose turn it is
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda: hearing[-1]))
    unregister_vllm_metrics()
    logger = stat_logger(config, [0])
    assert logger is not None
    # The engine said it in this order; the first front end was slow.
    saved, context = StepReport([], [], [], [], 0.0, 17), StatesReport(1, 5)
    ended, forgotten = StepReport([], [], [], [], 0.0, -17), StatesReport(-1, -5)
    for front_end, report, held in ((1, ended, forgotten), (0, saved, context)):
        hearing.append(front_end)
        envelope = report.as_connector_output().kv_connector_stats
        assert envelope is not None
        stats = SchedulerStats(kv_connector_stats=envelope.to_dict())
        held.add_to(stats)
        logger.record(stats, None)
    unregister_vllm_metrics()  # these write to a folder that will be gone
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    labels = {"model_name": str(tiny_model()), "engine": "0"}
    for name in ("saved_blocks", "states", "state_held_bytes"):
        assert registry.get_sample_value(f"vllm:kv_eviction_{name}", labels) == 0
