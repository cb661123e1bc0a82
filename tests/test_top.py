import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_kvselect.cli import app
from vllm_kvselect.top import Snapshot, TopError, render, watch

METRICS = """\
vllm:cache_config_info{engine="0",num_gpu_blocks="101",block_size="32"} 1.0
vllm:cache_config_info{engine="1",num_gpu_blocks="51",block_size="32"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 6.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 2.0
"""
EVICTION = """\
vllm:kv_eviction_saved_blocks{engine="0",model_name="m"} 300.0
vllm:kv_eviction_saved_blocks{engine="1",model_name="m"} 20.0
vllm:kv_eviction_requests_total{engine="0",model_name="m"} 12.0
vllm:kv_eviction_freed_blocks_total{engine="0",model_name="m"} 480.0
vllm:kv_eviction_freed_bytes_total{engine="0",model_name="m"} 1048576.0
vllm:kv_eviction_rounds_total{engine="0",model_name="m"} 7.0
vllm:kv_eviction_round_freed_blocks_total{engine="0",model_name="m"} 28.0
vllm:kv_eviction_prompt_cuts_total{engine="0",model_name="m"} 9.0
vllm:kv_eviction_prompt_freed_blocks_total{engine="0",model_name="m"} 54.0
vllm:kv_eviction_states{engine="0",model_name="m"} 2.0
vllm:kv_eviction_states{engine="1",model_name="m"} 1.0
vllm:kv_eviction_state_held_bytes{engine="0",model_name="m"} 3145728.0
vllm:kv_eviction_state_hits_total{engine="0",model_name="m"} 5.0
vllm:kv_eviction_state_tokens_total{engine="0",model_name="m"} 4800.0
vllm:kv_eviction_state_blocks_total{engine="0",model_name="m"} 100.0
vllm:kv_eviction_refusals_total{model_name="m",reason="not_allowed"} 2.0
vllm:kv_eviction_selection_seconds_sum{engine="0",model_name="m"} 1.5
"""


URL = "http://localhost:8000"


def draw(snapshot: Snapshot) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(snapshot, URL))
    return capture.get()


def test_engines_are_summed() -> None:
    snapshot = Snapshot.parse(METRICS + EVICTION)
    assert (snapshot.num_blocks, snapshot.num_used) == (150, 50)
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_answered) == (4, 7, 9)
    assert (snapshot.evicts, snapshot.model, snapshot.block_size) == (True, "m", 32)
    assert {name: value for name, value in snapshot.eviction.items() if value} == {
        "requests": 12,
        "freed_blocks": 480,
        "freed_bytes": 2**20,
        "prompt_cuts": 9,
        "prompt_freed_blocks": 54,
        "rounds": 7,
        "round_freed_blocks": 28,
        "state_hits": 5,
        "state_tokens": 4800,
        "state_blocks": 100,
        "states": 3,
        "state_held_bytes": 3 * 2**20,
        "selection_seconds": 1.5,
        "saved_blocks": 320,
        "refusals": 2,
    }
    assert snapshot.num_needed == 370


def test_a_frame_compares_with_the_full_cache() -> None:
    frame = draw(Snapshot.parse(METRICS + EVICTION))
    for name, number, share in (
        ("blocks used", 50, 33),
        ("blocks saved", 320, 213),
        ("full cache", 370, 247),
        ("pool", 150, 100),
    ):
        (line,) = [line for line in frame.splitlines() if line.startswith(name)]
        assert line.split()[len(name.split())] == str(number)
        assert line.rstrip().endswith(f" {share} % of the pool")
    assert "4 running, 7 waiting; 12 evicted, 2 refused" in frame
    assert "rounds        7 since the start, 28 blocks freed" in frame
    assert "in prompts    9 cuts since the start, 54 blocks freed before the prompts' ends" in frame
    assert "480 blocks freed (1.0 MiB), 1.50 s spent selecting" in frame


def test_a_frame_says_what_it_shows() -> None:
    assert draw(Snapshot.parse(METRICS)).splitlines()[0] == f"vllm-kvselect top   m at {URL}"


def test_watching_says_how_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = iter([Snapshot.parse(METRICS), Snapshot.parse(METRICS + EVICTION)])
    monkeypatch.setattr(Snapshot, "fetch", lambda _: next(snapshots))
    file = io.StringIO()
    console = Console(width=120, file=file, force_terminal=True)
    with pytest.raises(StopIteration):
        watch(URL, 0.1, console)
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    first, _, later = frames.partition("Ctrl+C leaves.")
    assert "runs without --kv-eviction" in first
    assert first.endswith("Every 0.1 s; ")
    assert "480 blocks freed" in later
    assert "Ctrl+C leaves." in later


def test_a_stock_server_is_shown_as_one() -> None:
    frame = draw(Snapshot.parse(METRICS))
    assert "runs without --kv-eviction" in frame
    assert "evicted" not in frame


def test_what_is_no_vllm_server_is_refused() -> None:
    with pytest.raises(TopError, match="no metrics of vLLM"):
        Snapshot.parse("process_cpu_seconds_total 1.0\n")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere", "http://a b"])
def test_a_server_that_does_not_answer_is_one_line_on_stderr(url: str) -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--url", url])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {url} does not answer (")
    assert "--url" in result.stderr
