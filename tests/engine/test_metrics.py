"""Reports of workers on their way to Prometheus."""

from vllm.v1.metrics.stats import SchedulerStats

from vllm_kvselect.engine.report import ContextReport, StepReport


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
    worker, scheduler = StepReport([], [], [], [], 0.5, 0), ContextReport(2, 30)
    envelope = worker.as_connector_output().kv_connector_stats
    assert envelope is not None
    stats = SchedulerStats(kv_connector_stats=envelope.to_dict())
    scheduler.add_to(stats)
    assert ContextReport.take(stats) == scheduler
    assert StepReport.take(stats) == worker
    assert stats.kv_connector_stats is None
