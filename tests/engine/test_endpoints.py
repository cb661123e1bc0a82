"""Every endpoint that generates honours the settings that its client sent, or refuses them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from vllm.sampling_params import BeamSearchParams

from tests.engine.conftest import EngineFactory
from tests.engine.server import BLOCK_SIZE, DTYPE, metrics, post, serving
from tests.marks import starts_engine
from vllm_kvselect.tiny_model import tiny_model

pytestmark = pytest.mark.xdist_group("cutting_server")
EVICTION = ["--kv-eviction", "adakv-perturb", "--kv-eviction-budget", "128"]
EVICTION += ["--kv-eviction-prompt-interval", "128"]
EVICTION += ["--kv-eviction-allow-override", "method,budget"]
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
NONE = {"kv_eviction": "none"}


@pytest.fixture(scope="module")
def cutting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that cuts prompts while they are computed, even those of one-token requests."""
    with serving(tmp_path_factory.mktemp("server"), *EVICTION, "--enable-scale-out") as url:
        yield url


CHAT = [{"role": "user", "content": TEXT}]
SAMPLING: dict[str, Any] = {"max_tokens": 2}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2, "n": 2, "temperature": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2, "n": 2, "temperature": 1},
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT], "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/invocations": {"prompt": TEXT, "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [*range(500, 900)], "sampling_params": SAMPLING},
    "/generative_scoring": {"query": TEXT, "items": ["a"], "label_token_ids": [100, 101]},
}
WITHOUT_SETTINGS = ("/inference/v1/generate", "/generative_scoring")


def num_cuts(url: str) -> float:
    """How often prompts were cut, or what a cut had left was found."""
    names = ("prompt_cuts", "state_hits")
    return sum(metrics(url)[f"vllm:kv_eviction_{name}_total"] for name in names)


def refused(url: str, path: str, **body: Any) -> str:
    with pytest.raises(HTTPError) as caught:
        post(url, path, **ENDPOINTS[path] | body).close()
    assert caught.value.code == 400
    return str(json.load(caught.value)["error"]["message"])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_settings_are_honoured_where_they_belong_and_refused_elsewhere(
    path: str, cutting_server: str
) -> None:
    url, own = cutting_server, {"vllm_xargs": NONE}
    before = num_cuts(url)
    # Other people's fields are ignored, as in stock vLLM.
    post(url, path, **ENDPOINTS[path], extra_body={"x": {"top_k": 1}}, extra_args={"y": 1}).close()
    cut = num_cuts(url)
    # What asks for likelihoods of a single token reads everything.
    assert (cut > before) == (path != "/generative_scoring")
    if cut > before:
        assert metrics(url)["vllm:kv_eviction_states"] > 0
    if path == "/inference/v1/generate":
        own = {"sampling_params": SAMPLING | {"extra_args": NONE}}
    if path != "/generative_scoring":
        post(url, path, **ENDPOINTS[path] | own).close()
    for body in (NONE, {"extra_body": {"vllm_xargs": NONE}}, {"extra_args": NONE}):
        assert "kv_eviction' has no effect here" in refused(url, path, **body)
    if path in WITHOUT_SETTINGS:
        assert "vllm_xargs.kv_eviction' has no effect" in refused(url, path, vllm_xargs=NONE)
    assert num_cuts(url) == cut


@pytest.mark.parametrize(
    "stray", [NONE, {"vllm_xargs": NONE}, {"extra_args": {"vllm_xargs": NONE}}], ids=repr
)
def test_settings_are_not_lost_inside_of_sampling_parameters(
    stray: dict[str, Any], cutting_server: str
) -> None:
    message = refused(cutting_server, "/inference/v1/generate", sampling_params=SAMPLING | stray)
    assert "kv_eviction' has no effect here" in message


@pytest.mark.parametrize("own", [{}, {"vllm_xargs": NONE}], ids=repr)
def test_a_beam_search_is_stock_vllms_where_prompts_are_cut(
    own: dict[str, Any],
    cutting_server: str,
    text_tokens: list[int],
    start_full_engine: EngineFactory,
) -> None:
    prompt, before = text_tokens[3000:3900], num_cuts(cutting_server)
    beams = {"use_beam_search": True, "n": 2, "max_tokens": 4, "ignore_eos": True}
    body = {"prompt": prompt, **beams, "logprobs": 1, "return_token_ids": True, **own}
    with post(cutting_server, **body) as response:
        choices = json.load(response)["choices"]
    assert num_cuts(cutting_server) == before
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    settings = {"dtype": DTYPE, "block_size": BLOCK_SIZE, "skip_tokenizer_init": False}
    with start_full_engine(None, 100, **settings) as engine:
        (stock,) = engine.llm.beam_search([{"prompt_token_ids": prompt}], params)
    for choice, beam in zip(choices, stock.sequences, strict=True):
        assert choice["token_ids"] == beam.tokens[len(prompt) :]
        total = sum(choice["logprobs"]["token_logprobs"])
        assert total == pytest.approx(beam.cum_logprob, abs=0.02)


@pytest.mark.load  # starts an engine of its own; the endpoints are asked each time
def test_a_batch_file_loses_no_settings(tmp_path: Path) -> None:
    lines = {
        "plain": {},
        "own": {"vllm_xargs": NONE},
        "inside": {"extra_body": {"vllm_xargs": NONE}},
        "beside": {"extra_args": NONE},
    }
    answers = run_batch(tmp_path, lines)
    for name in ("plain", "own"):
        assert answers[name]["response"]["status_code"] == 200
    for name in ("inside", "beside"):
        assert "kv_eviction' has no effect here" in json.dumps(answers[name])


@starts_engine
def run_batch(folder: Path, lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `vllm run-batch` writes, by name of the request."""
    path, source, target = "/v1/chat/completions", folder / "in.jsonl", folder / "out.jsonl"
    body = ENDPOINTS[path] | {"model": "small"}
    asked = [
        {"custom_id": name, "method": "POST", "url": path, "body": body | more}
        for name, more in lines.items()
    ]
    source.write_text("".join(f"{json.dumps(each)}\n" for each in asked))
    command = [Path(sys.executable).with_name("vllm"), "run-batch", "-i", source, "-o", target]
    command += ["--model", tiny_model(), "--served-model-name", "small", "--dtype", DTYPE]
    command += ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "256M"]
    subprocess.run([*map(str, command), *EVICTION], check=True, capture_output=True)
    found = [json.loads(line) for line in target.read_text().splitlines()]
    return {each["custom_id"]: each for each in found}
