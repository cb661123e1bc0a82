"""Settings of single requests and metrics over HTTP."""

import json
import urllib.request
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.engine.conftest import EngineFactory
from tests.engine.server import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    DTYPE,
    ENTRIES_PER_BLOCK,
    answering,
    blocks_held,
    metrics,
    post,
    readings,
    refusal,
    serving,
)
from vllm_kvselect.cli import app
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.request import REFUSAL_REASONS
from vllm_kvselect.top import Snapshot, render

pytestmark = pytest.mark.xdist_group("server")  # one server for all
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
COUNTERS = ("requests", "dropped_entries", "freed_blocks", "freed_bytes")


def change(before: dict[str, float], after: dict[str, float], name: str) -> float:
    name = f"vllm:kv_eviction_{name}"
    return after[name] - before[name]


def num_freed(num_prompt_tokens: int, **values: Any) -> int:
    planned = cuts(
        num_prompt_tokens, BLOCK_SIZE, EvictionConfig(**{"method": "adakv-perturb", **values})
    )
    return planned.num_freed(num_prompt_tokens)


@pytest.mark.parametrize(
    ("xargs", "reason", "message"),
    [
        ({"kv_eviction_budget": 1.5}, "invalid_value", "write an integer, such as 1024"),
        ({"kv_eviction_budget": 63}, "unsupported", "kv_eviction_budget = 63 retains 63 entries"),
        ({"kv_eviction_window": 8}, "unknown_key", "accepted keys: kv_eviction"),
    ],
)
def test_settings_that_cannot_be_honoured_are_a_400_with_the_reason(
    xargs: dict[str, Any], reason: str, message: str, server: str, text_tokens: list[int]
) -> None:
    before = metrics(server)
    for stream in (False, True):
        body = {"prompt": text_tokens[:500], "max_tokens": 4, "stream": stream}
        status, error = refusal(server, **body, vllm_xargs=xargs)
        assert (status, error["type"]) == (400, "BadRequestError")
        assert message in error["message"]
        assert error["param"] == f"vllm_xargs.{next(iter(xargs))}"
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
    assert refusal(server, "/v1/chat/completions", **chat, vllm_xargs=xargs)[0] == 400
    after = metrics(server)
    for name in REFUSAL_REASONS:
        assert change(before, after, f"refusals_total {name}") == 3 * (name == reason)
    with post(server, prompt=text_tokens[:500], max_tokens=4) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4


ENDPOINTS = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"kv_eviction": "none"}, "kv_eviction", 'send it as {"vllm_xargs": {"kv_eviction": ...}}'),
        ({"kv_evict_budget": 64}, "kv_evict_budget", "has no effect here"),
        (
            {"vllm_xargs": {f"key {i}": 0 for i in range(65)}},
            "vllm_xargs",
            "65 keys of vllm_xargs are too many",
        ),
        (
            {"use_beam_search": True, "vllm_xargs": {"kv_eviction_budget": 128}},
            "vllm_xargs.kv_eviction_budget",
            "no effect with use_beam_search, which keeps the full cache",
        ),
    ],
)
def test_settings_that_would_have_no_effect_are_a_400_on_both_endpoints(
    path: str, body: dict[str, Any], param: str, message: str, server: str
) -> None:
    status, error = refusal(server, path, **ENDPOINTS[path], **body)
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize("xargs", [None, {"kv_eviction": "none", "session_id": "a"}])
def test_a_beam_search_drops_nothing_and_finds_its_prompts_in_the_cache(
    xargs: dict[str, Any] | None, server: str, text_tokens: list[int]
) -> None:
    prompt, before = text_tokens[7000:8000], metrics(server)
    body = {"prompt": prompt, "max_tokens": 4, "use_beam_search": True, "n": 2}
    with post(server, **body, vllm_xargs=xargs) as response:
        assert len(json.load(response)["choices"]) == 2
    after = metrics(server)
    for name in ("requests_total", "freed_blocks_total", "selection_seconds_count"):
        assert change(before, after, name) == 0
    # Two beams in each of three steps, of which 31 blocks of 32 tokens are there; dropping would
    # cap that at 23.
    hits = "vllm:prefix_cache_hits_total"
    assert after[hits] - before[hits] >= 3 * 2 * 31 * BLOCK_SIZE
    chat = {"messages": [{"role": "user", "content": "Hello"}], "use_beam_search": True, "n": 2}
    with post(server, "/v1/chat/completions", **chat, max_tokens=3, vllm_xargs=xargs) as response:
        assert len(json.load(response)["choices"]) == 2


def test_the_full_cache_on_request_gives_stock_vllms_tokens(
    server: str, text_tokens: list[int], start_full_engine: EngineFactory
) -> None:
    # A prompt that the server has not seen: a prefix from its cache would change the rounding.
    prompt, xargs = text_tokens[5000:5900], {"kv_eviction": "none"}
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    with post(server, **body, vllm_xargs=xargs) as response:
        (answer,) = json.load(response)["choices"]
    with start_full_engine(None, 100, dtype=DTYPE, block_size=BLOCK_SIZE) as engine:
        (stock,) = engine.outputs([prompt], 24)
    assert answer["token_ids"] == list(stock.token_ids)


def test_metrics_are_those_of_the_plans(server: str, text_tokens: list[int]) -> None:
    requests: list[tuple[int, dict[str, Any], int]] = [
        (1500, {}, num_freed(1500, budget=256)),
        (1000, {"kv_eviction": "snapkv", "kv_eviction_budget": 0.5}, num_freed(1000, budget=0.5)),
        (1100, {"kv_eviction": "layer-keydiff"}, num_freed(1100, budget=256)),
        (600, {"kv_eviction": "knorm"}, num_freed(600, budget=256)),
        (1000, {"kv_eviction": "none"}, 0),
        (100, {}, 0),
    ]
    before = metrics(server)
    for length, xargs, _ in requests:
        post(server, prompt=text_tokens[:length], max_tokens=3, vllm_xargs=xargs).close()
    after = metrics(server)
    freed = [(length, blocks) for length, _, blocks in requests if blocks]
    num_blocks = sum(blocks for _, blocks in freed)
    expected = (4, num_blocks * ENTRIES_PER_BLOCK, num_blocks, num_blocks * BLOCK_BYTES)
    for name, number in zip(COUNTERS, expected, strict=True):
        assert change(before, after, f"{name}_total") == number
    ratios = [1 - blocks * BLOCK_SIZE / length for length, blocks in freed]
    assert change(before, after, "retained_ratio_count") == 4
    assert change(before, after, "retained_ratio_sum") == pytest.approx(sum(ratios))
    assert change(before, after, "selection_seconds_count") == 4
    assert 0 < change(before, after, "selection_seconds_sum") < 60
    assert after["vllm:kv_eviction_saved_blocks"] == 0


def test_a_prompt_that_ends_with_its_first_token_costs_nothing(
    server: str, text_tokens: list[int]
) -> None:
    prompt, xargs = text_tokens[2000:2700], {"kv_eviction": "snapkv-perturb"}
    before = metrics(server)
    body = {"prompt": prompt, "vllm_xargs": xargs, "return_token_ids": True}
    with post(server, **body, max_tokens=1) as response:
        (first,) = json.load(response)["choices"][0]["token_ids"]
    with post(server, **body, max_tokens=9, stop_token_ids=[first]) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 1
    names = ("requests_total", "dropped_entries_total", "retained_ratio_count")
    for name in (*names, "selection_seconds_sum"):
        assert change(before, metrics(server), name) == 0


def test_metrics_are_named_by_the_rules_of_prometheus(server: str) -> None:
    with urllib.request.urlopen(f"{server}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE ")}
    ours = {
        name: kind
        for name, kind in kinds.items()
        if name.startswith("vllm:kv_eviction_") and not name.endswith("_created")
    }
    assert len(ours) == 22
    units = {"blocks", "bytes", "contexts", "cuts", "entries", "hits", "ratio", "requests"}
    units |= {"rounds", "seconds", "states", "tokens"}
    for name, kind in ours.items():
        assert name.endswith("_total") is (kind == "counter")
        *others, last = name.removeprefix("vllm:kv_eviction_").removesuffix("_total").split("_")
        assert last in units | {"refusals"}
        assert not units & {*others}


def test_blocks_saved_are_those_of_the_requests_that_run(
    server: str, text_tokens: list[int]
) -> None:
    def num_saved() -> float:
        return metrics(server)["vllm:kv_eviction_saved_blocks"]

    one, other = num_freed(1400, budget=256), num_freed(700, budget=256)
    with answering(server, text_tokens[:1400]):
        seen = readings(num_saved, lambda number: number == one)
        with answering(server, text_tokens[:700]):
            seen += readings(num_saved, lambda number: number == one + other)
        seen += readings(num_saved, lambda number: number == one)
    seen += readings(num_saved, lambda number: number == 0)
    assert [number for number, _ in groupby(seen)][-4:] == [one, one + other, one, 0]
    assert set(seen) == {0, one, one + other}


def test_every_metric_of_the_dashboard_is_served(server: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    words = " ".join(queries).replace("(", " ").replace("{", " ").replace("[", " ").split()
    used = {word for word in words if word.startswith("vllm:")}
    served = {name.split()[0] for name in metrics(server)}
    assert used <= served
    ours = {name for name in served if name.startswith("vllm:kv_eviction_")}
    suffixes = ("_bucket", "_sum", "_count", "_created")
    shown = {name.removesuffix("_bucket").removesuffix("_sum") for name in used}
    assert {name for name in ours if not name.endswith(suffixes)} <= used
    assert {name.removesuffix("_bucket") for name in ours if name.endswith("_bucket")} <= shown


def test_top_shows_what_the_server_says(server: str, text_tokens: list[int]) -> None:

    def frame() -> tuple[int, Snapshot, int]:
        return blocks_held(server), Snapshot.fetch(server), blocks_held(server)

    with answering(server, text_tokens[:1500]):
        # Neither while the whole prompt is held nor while another block is taken.
        *_, (held, snapshot, _) = readings(frame, lambda f: 0 < f[0] == f[2] < 47)
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 0)
    assert snapshot.num_used == held
    assert snapshot.eviction["saved_blocks"] == num_freed(1500, budget=256) == 38
    assert snapshot.num_needed == held + 38
    readings(lambda: blocks_held(server), lambda number: number == 0)
    result = CliRunner().invoke(app, ["top", "--once", "--url", server], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "blocks saved" in result.stdout
    assert "0 running, 0 waiting" in result.stdout
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(snapshot, server))
    assert "1 running, 0 waiting" in capture.get()


@pytest.fixture(scope="module")
def two_front_ends(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with two API processes, which share metrics in files, and two engines.

    The engines share nothing but a folder of compressed contexts. In float32: how a token rounds
    in bfloat16 depends on how many others are computed with it.
    """
    folder = tmp_path_factory.mktemp("two")
    options = ["--dtype", "float32", "--max-model-len", "4096"]
    options += ["--kv-eviction", "snapkv", "--kv-eviction-budget", "256"]
    options += ["--kv-eviction-allow-override", "context"]
    options += ["--kv-eviction-context-store", str(folder / "contexts")]
    options += ["--api-server-count", "2", "--data-parallel-size", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else both compute on one core
        with serving(folder, *options) as url:
            yield url


def test_two_front_ends_refuse_and_count_together(
    two_front_ends: str, text_tokens: list[int]
) -> None:
    url = two_front_ends
    for xargs, allowed in (
        ({"kv_eviction": "none"}, "--kv-eviction-allow-override method"),
        ({"kv_eviction_budget": 512}, "--kv-eviction-allow-override budget"),
    ):
        for _ in range(4):
            status, error = refusal(url, prompt="a", max_tokens=4, vllm_xargs=xargs)
            assert status == 400
            assert allowed in error["message"]
    for _ in range(4):
        own_default = {"kv_eviction": "snapkv", "kv_eviction_budget": 256}
        body = {"prompt": text_tokens[:800], "max_tokens": 2, "vllm_xargs": own_default}
        post(url, **body).close()
    counted = ("vllm:kv_eviction_requests_total", "vllm:kv_eviction_saved_blocks")
    # That nothing is saved any more is said by a step after the last answer.
    *_, found = readings(lambda: metrics(url), lambda m: [m[name] for name in counted] == [4, 0])
    assert found["vllm:kv_eviction_refusals_total not_allowed"] == 8
    assert found["vllm:kv_eviction_freed_blocks_total"] == 4 * num_freed(800, budget=256)
    assert found["vllm:kv_eviction_retained_ratio_count"] == 4
    assert Snapshot.fetch(url).eviction["requests"] == 4


def test_an_engine_finds_what_its_sibling_compressed(
    two_front_ends: str, text_tokens: list[int]
) -> None:
    counted = [f"vllm:kv_eviction_{name}_contexts_total" for name in ("stored", "loaded")]
    body = {"prompt": text_tokens[1000:3040], "max_tokens": 12, "logprobs": 1, "ignore_eos": True}
    body["vllm_xargs"] = {"kv_eviction_context": 2000}
    answers = []
    for engine, expected in ((0, [1, 0]), (1, [1, 1])):
        with post(two_front_ends, engine=engine, **body) as response:
            answers.append(json.load(response)["choices"][0])
        readings(  # the first writes in the background
            lambda: [metrics(two_front_ends)[name] for name in counted], expected.__eq__
        )
    assert answers[0]["text"] == answers[1]["text"]
    logprobs = [each["logprobs"]["token_logprobs"] for each in answers]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
