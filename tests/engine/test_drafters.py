"""Drafters with layers of their own: every token is the one that it is without them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest

from tests.engine.adapters import RANK, random_adapter
from tests.engine.conftest import (
    BLOCK_SIZE,
    Answer,
    Engine,
    EngineFactory,
    engines_of,
    preempting_all,
)
from tests.engine.machine import BUT_PREFILL
from tests.engine.random_models import SHAPE, random_eagle, random_llama, random_prompts
from tests.engine.test_cuda_end_to_end import on_flash_attention  # noqa: F401 (fixture)
from tests.load.mixture import (
    DENSE,
    GREEDY,
    LONG,
    MAX_MODEL_LEN,
    WITHOUT_TOKENIZER,
    Request,
    assert_as_alone,
    draw,
    serve,
    serve_alone,
)
from tests.load.mixture import SETTINGS as MIXED
from tests.load.mixture import Answer as Received
from vllm_kvselect.engine.start_up import block_bytes

pytestmark = pytest.mark.xdist_group("drafters")
NUM_LAYERS = 8  # EAGLE3 looks at three different ones
NUM_DRAFTED = 3
NUM_BLOCKS = 40
BLOCK_BYTES = BLOCK_SIZE * SHAPE["num_key_value_heads"] * 2 * SHAPE["head_dim"] * 4  # of a layer
NUM_GENERATED = 61
ROUNDS = {"kv_eviction_decode_budget": 80, "kv_eviction_decode_interval": 32}
IN_PROMPT = {"kv_eviction_prompt_interval": 64, "kv_eviction_budget": 64}
# Methods that choose for each head, for the heads of a layer, and for all layers together; with
# queries that are looked through later, and probes.
SETTINGS: list[dict[str, Any]] = [
    {"kv_eviction": "snapkv"},
    {"kv_eviction": "adakv-perturb", **IN_PROMPT},
    {"kv_eviction": "snapkv-perturb", **ROUNDS},
    {"kv_eviction": "ada-probe"},
    {"kv_eviction": "thetakv", "kv_eviction_context": 150},
    {"kv_eviction": "thetakv", "kv_eviction_context": 150},
    {"kv_eviction": "layer-probe"},
    {"kv_eviction": "layer-probe", **ROUNDS},
    {"kv_eviction": "layer-keydiff", **ROUNDS, **IN_PROMPT},
    {"kv_eviction": "pyramidkv"},
    {"kv_eviction": "layer-keydiff", "kv_eviction_context": 230, **IN_PROMPT},
    {"kv_eviction": "none"},
]
PROMPTS = random_prompts([200 + 17 * index for index in range(len(SETTINGS))])
PROMPTS[5][:160] = PROMPTS[4][:160]
CHOOSE_BY_HEAD = [0, 2, 9, 11]  # what two ranks take
SERVER = {
    "method": "adakv-perturb",
    "budget": 96,
    "check_integrity": True,
    "allow_override": BUT_PREFILL,
}
MIXED_SERVER = {**DENSE, "check_integrity": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    random_llama(folder / "draft_model", NUM_LAYERS)
    random_eagle(folder / "eagle")
    random_eagle(folder / "eagle3", num_hidden_states=3)
    return folder


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[EngineFactory]:
    with engines_of(folder / "draft_model") as factory:
        yield factory


@pytest.fixture(scope="module")
def expected(start: EngineFactory) -> list[Answer]:
    with start(SERVER, 130) as engine:
        return engine.generate(PROMPTS, NUM_GENERATED, SETTINGS)


def drafting(folder: Path, method: str) -> dict[str, Any]:
    """A pool with room for some of the requests, and chunks that cut windows."""
    drafter = {"method": method, "model": str(folder / method)}
    layers = NUM_LAYERS + (NUM_LAYERS if method == "draft_model" else 1)
    return {
        "speculative_config": {**drafter, "num_speculative_tokens": NUM_DRAFTED},
        "kv_cache_memory_bytes": NUM_BLOCKS * layers * BLOCK_BYTES,
        "max_model_len": 512,
        "max_num_batched_tokens": 150,
        "max_num_seqs": 6,
        "disable_log_stats": False,
    }


def counted(engine: Engine, name: str) -> float:
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == name)


def mixed_requests(num_requests: int, num_distinct: int, make_rounds: bool = True) -> list[Request]:
    """Requests of all kinds that are answered greedily without a tokenizer."""
    (text,) = random_prompts([8000])
    kinds = {name: kind for name, kind in GREEDY.items() if name in WITHOUT_TOKENIZER}
    settings = [each for each in MIXED if "kv_prefill" not in each]
    if not make_rounds:
        del kinds[LONG]
        settings = [each for each in settings if "kv_eviction_decode_budget" not in each]
    return draw(text, num_requests, num_distinct, seed=4, kinds=kinds, settings=settings)


def answered_alone(start: EngineFactory, requests: list[Request]) -> dict[str, Received]:
    """What the CPU backend answers each of them, without a drafter."""
    room = {"enable_prefix_caching": False, "disable_log_stats": False}
    with start(MIXED_SERVER, 100, max_model_len=MAX_MODEL_LEN, **room) as engine:
        return serve_alone(engine.llm, requests)


@pytest.fixture(scope="module")
def mixed(start: EngineFactory) -> tuple[list[Request], dict[str, Received]]:
    """Mixed requests and what each is answered alone."""
    requests = mixed_requests(500, 100)
    return requests, answered_alone(start, requests)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The CPU's, or that of CUDA over stand-ins; the module's fixtures had the CPU's before."""
    if request.param == "FlashAttention":
        request.getfixturevalue("on_flash_attention")
    return str(request.param)


FLASH_ATTENTION = pytest.param("FlashAttention", marks=pytest.mark.load)


# On CUDA model runner V2 serves, with the same stand-ins in `test_runner_v2.py`.
@pytest.mark.parametrize("backend", ["CPU", FLASH_ATTENTION], indirect=True)
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_tokens_are_those_without_a_drafter(
    method: str, backend: str, start: EngineFactory, folder: Path, expected: list[Answer]
) -> None:
    with start(SERVER, 0, **drafting(folder, method)) as engine:
        assert type(engine.impls[-1]).__name__.startswith(f"Headwise{backend}")
        with preempting_all(num_answering=4, num_tokens=NUM_GENERATED // 2) as preempted:
            answers = engine.generate(PROMPTS, NUM_GENERATED, SETTINGS)
        assert preempted
        assert answers == expected
        assert counted(engine, "vllm:spec_decode_num_drafts") > 50
        assert counted(engine, "vllm:kv_eviction_state_hits") > 0
        assert engine.blocks_in_use() == 0
        assert block_bytes(engine.llm.llm_engine.vllm_config) * NUM_BLOCKS == (
            engine.worker.vllm_config.cache_config.kv_cache_memory_bytes
        )


@pytest.mark.parametrize("method", ["draft_model", pytest.param("eagle", marks=pytest.mark.load)])
def test_two_ranks_draft_and_choose_as_one(
    method: str,
    start: EngineFactory,
    folder: Path,
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    chosen = [SETTINGS[index] for index in CHOOSE_BY_HEAD]
    prompts = [PROMPTS[index] for index in CHOOSE_BY_HEAD]
    with start(SERVER, 0, tensor_parallel_size=2, **drafting(folder, method)) as engine:
        answers = engine.generate(prompts, NUM_GENERATED, chosen)
        assert counted(engine, "vllm:spec_decode_num_drafts") > 15
    for answer, index in zip(answers, CHOOSE_BY_HEAD, strict=True):
        assert answer.token_ids == expected[index].token_ids


@pytest.mark.load
def test_an_adapters_requests_are_answered_as_without_a_drafter(
    start: EngineFactory, folder: Path, tmp_path: Path
) -> None:
    out = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    names = [f"model.layers.{layer}.self_attn" for layer in range(NUM_LAYERS)]
    random_adapter(
        tmp_path / "adapter",
        {f"{name}.q_proj": (out, SHAPE["hidden_size"]) for name in names}
        | {f"{name}.o_proj": (SHAPE["hidden_size"], out) for name in names},
    )
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = []
    for drafter in ({}, drafting(folder, "draft_model")):
        lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
        with start(SERVER, 0 if drafter else 130, **drafter, **lora) as engine:
            asked = [engine.sampling(NUM_GENERATED, each) for each in SETTINGS]
            found = engine.llm.generate(prompts, asked, use_tqdm=False, lora_request=request)
            base = engine.generate(PROMPTS[:1], NUM_GENERATED, SETTINGS[:1])
            answers.append([result.outputs[0].token_ids for result in found])
            assert answers[-1][0] != base[0].token_ids
    assert answers[1] == answers[0]


@pytest.mark.load  # tests/engine/test_equivalence.py has a drafter each time
@pytest.mark.timeout(3600)  # stand-ins take their time
@pytest.mark.parametrize(
    ("backend", "num_requests"), [("CPU", 500), ("FlashAttention", 300)], indirect=["backend"]
)
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_mixed_requests_are_answered_as_alone(
    method: str,
    backend: str,
    num_requests: int,
    start: EngineFactory,
    folder: Path,
    mixed: tuple[list[Request], dict[str, Received]],
) -> None:
    requests, expected = mixed[0][:num_requests], mixed[1]
    settings = drafting(folder, method) | {"max_model_len": MAX_MODEL_LEN}
    with start(MIXED_SERVER, 0, **settings) as engine:
        assert type(engine.impls[-1]).__name__.startswith(f"Headwise{backend}")
        service = serve(engine.llm, requests, 16, seed=4, preempt=0.02, stream=True)
        assert counted(engine, "vllm:spec_decode_num_draft_tokens") > 4 * num_requests
        assert counted(engine, "vllm:spec_decode_num_accepted_tokens") > 10  # random heads guess
        assert engine.worker.kv_eviction_stats()["num_evicted"] > num_requests / 2
        assert engine.blocks_in_use() == 0
    assert_as_alone(requests, expected, service.answers)
    for event in ("preemptions", "resets", "left", "cached tokens"):
        assert service.seen[event] > 0, service.seen


def test_a_drafter_that_is_the_model_itself_goes_on_being_right(
    start: EngineFactory, folder: Path
) -> None:
    settings = [
        ({"kv_eviction_budget": 1.0}, 0),
        ({"kv_eviction_budget": 64}, 1),
        ({"kv_eviction_budget": 64, "kv_eviction": "layer-keydiff"}, 1),
        # The second cut of layers that share pages: what a probe says of an entry stays.
        ({**ROUNDS, "kv_eviction": "layer-probe"}, 2),
        # Cut within a step that goes on, before the drafter's layers are computed, and any draft.
        ({"kv_eviction_context": 150, "kv_eviction_budget": 64}, 0),
        ({"kv_eviction_context": 150, "kv_eviction_budget": 64, "kv_eviction": "layer-probe"}, 0),
    ]
    drafted, accepted = [], []
    with start(SERVER, 0, **drafting(folder, "draft_model")) as engine:
        for own, _ in settings:
            engine.generate(PROMPTS[:3], NUM_GENERATED, [own] * 3)
            drafted.append(counted(engine, "vllm:spec_decode_num_draft_tokens"))
            accepted.append(counted(engine, "vllm:spec_decode_num_accepted_tokens"))
    rejected = np.diff(np.subtract(drafted, accepted), prepend=0)
    # Drafts that were made before a cut have seen more than the model after it.
    assert (rejected <= [num_cuts * NUM_DRAFTED * 3 for _, num_cuts in settings]).all()
    assert (np.diff(drafted, prepend=0) > 3 * (NUM_GENERATED - 1) / (NUM_DRAFTED + 1)).all()
