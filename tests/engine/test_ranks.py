"""Several ranks: each scores, allocates and packs what it holds, in the same blocks as the others.

The workers are processes of their own, so what they retain is recorded there. Tokens and retained
entries are compared with those of a float64 model that chooses by rank.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import BLOCK_SIZE, Answer, _engine, engine_settings, preempting_all
from tests.engine.float64 import BUDGET, num_packed, tail_begin
from tests.engine.float64_model import Answer as ExpectedAnswer
from tests.engine.float64_model import Model
from tests.engine.float64_rounds import Answered, Round, RoundsOf, recording_rounds
from tests.engine.nodes import first_node, second_node, two_nodes
from tests.engine.random_models import random_prompts
from tests.engine.recorder import recording
from tests.method_cases import MethodCase
from vllm_kvselect.kernels import cpu
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.value_norms import OutputProjection

pytestmark = pytest.mark.xdist_group("ranks")
NUM_LAYERS, NUM_KV_HEADS = 4, 4  # two of each on a rank
# A stage counts its layers from 0, so `random` draws there what it draws in the first stage.
OF_STAGES = [name for name in METHODS if not METHODS[name].pooled and name != "random"]
CASES = {"tensor": [*METHODS], "pipeline": OF_STAGES}
SETTINGS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    # vLLM 0.32 on CPU runs a pipeline only if the model was warmed up, so not with enforce_eager.
    "pipeline": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
}
ROUND_METHODS = [
    "streaming-llm",
    "snapkv-perturb",
    "r-kv",
    "adakv-perturb",
    "layer-keydiff",
    "ada-probe",
    "layer-probe",
]
BOTH = pytest.mark.parametrize("kind", CASES)


def start_recording(worker: Any) -> None:
    """Runs in every worker."""
    worker.recording = recording(worker.model_runner)
    worker.recorder = worker.recording.__enter__()


@dataclass
class Rank:
    """A worker's record.

    Attributes:
        retained: `(KV head, token)` of the packed entries by prompt length and layer.
        stats: The worker's counts.
        projections: W_O of its layers, `[num_kv_heads, head_size, group, hidden_size]`, packed.
    """

    retained: dict[tuple[int, int], set[tuple[int, int]]]
    stats: dict[str, float]
    projections: list[torch.Tensor]


def recorded(worker: Any) -> Rank:
    """Runs in every worker."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    projections = [layer.impl.output_projection.packed for layer in layers]
    return Rank(worker.recorder.retained, worker.worker.kv_eviction_stats(), projections)


@dataclass
class Served:
    """What two ranks answered.

    Attributes:
        prompts: One of each method.
        answers: Their answers.
        ranks: The workers' records.
        preempted: Tokens that each request had generated when it was preempted.
        metrics: Counters of eviction by name.
    """

    prompts: list[list[int]]
    answers: list[Answer]
    ranks: list[Rank]
    preempted: list[int]
    metrics: dict[str, float]


Beside = Callable[[dict[str, Any]], AbstractContextManager[None]]


def serve(
    model: Path, methods: list[str], beside: Beside = lambda _: nullcontext(), **settings: Any
) -> Served:
    """Serves a prompt with each method at once, in chunks; all are preempted on the way.

    Args:
        model: Its folder.
        methods: What the prompts are served with.
        beside: What runs beside the engine, by the engine's settings.
        settings: Of the engine.
    """
    prompts = random_prompts([250 + 7 * index for index in range(len(methods))])
    eviction = {"budget": BUDGET, "allow_override": ["method"]}
    settings = {
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 384,
        "disable_log_stats": False,
        **settings,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        given = engine_settings(eviction, 220, model=model, **settings)
        with beside(given), _engine(eviction, 220, model=model, **settings) as engine:
            engine.llm.collective_rpc(start_recording)
            with preempting_all(5) as preempted:
                answers = engine.generate(prompts, 12, [{"kv_eviction": name} for name in methods])
            metrics = {
                metric.name.removeprefix("vllm:kv_eviction_"): metric.value
                for metric in engine.llm.get_metrics()
                if metric.name.startswith("vllm:kv_eviction_") and hasattr(metric, "value")
            }
            ranks = engine.llm.collective_rpc(recorded)
    return Served(prompts, answers, ranks, preempted, metrics)


@pytest.fixture(scope="module")
def served(random_model: Path) -> Callable[[str], Served]:
    """What was served with a kind of parallelism, once for all tests."""
    return cache(lambda kind: serve(random_model, CASES[kind], **SETTINGS[kind]))


def holder(kind: str, layer: int, head: int) -> tuple[int, int, int]:
    """Which rank has a KV head of a layer, and its own numbers for them."""
    if kind == "tensor":
        return head // 2, layer, head % 2
    return layer // 2, layer % 2, head


@pytest.mark.parametrize(("kind", "method"), [(kind, m) for kind in CASES for m in CASES[kind]])
def test_ranks_answer_and_retain_as_the_oracle(
    kind: str, method: str, served: Callable[[str], Served], random_model: Path
) -> None:
    index = CASES[kind].index(method)
    prompt, answer = served(kind).prompts[index], served(kind).answers[index]
    num_ranks = 2 if kind == "tensor" else 1
    oracle = ExpectedAnswer(Model(random_model), prompt, MethodCase(method), num_ranks)
    retained = {}
    for layer, head in oracle.expected:
        rank, own_layer, own_head = holder(kind, layer, head)
        of_layer = served(kind).ranks[rank].retained[len(prompt), own_layer]
        retained[layer, head] = {token for owner, token in of_layer if owner == own_head}
    oracle.check(answer.token_ids, answer.logprobs, retained)


@pytest.mark.load  # the tests of two ranks run each time
@BOTH
def test_two_nodes_answer_and_retain_what_two_ranks_of_one_node_do(
    kind: str, served: Callable[[str], Served], random_model: Path, tmp_path: Path
) -> None:
    node = partial(second_node, tmp_path, random_model)
    on_two = serve(random_model, CASES[kind], beside=node, **SETTINGS[kind], **two_nodes())
    on_one = served(kind)
    assert on_two.answers == on_one.answers
    assert [rank.retained for rank in on_two.ranks] == [rank.retained for rank in on_one.ranks]
    assert on_two.metrics == on_one.metrics


@pytest.mark.load  # `test_models` compares specs each time
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("tensor", "specs for the same layer are different across workers"),  # vLLM's own words
        ("pipeline", "nodes were started with different --kv-eviction"),
    ],
)
def test_nodes_with_other_options_do_not_start(
    kind: str, error: str, random_model: Path, tmp_path: Path
) -> None:
    settings = {"skip_tokenizer_init": True, **SETTINGS[kind], **two_nodes()}
    settings = engine_settings({"budget": BUDGET}, 100, model=random_model, **settings)
    other = {"method": "adakv-perturb", "budget": BUDGET + 1}
    others = {**settings, "additional_config": {"kv_eviction": other}}
    with second_node(tmp_path, random_model, others):
        first = first_node(random_model, settings)
    assert first.returncode != 0
    assert re.search(error, first.stdout)


def start_recording_rounds(worker: Any) -> None:
    """Runs in every worker."""
    start_recording(worker)
    worker.recording_rounds = recording_rounds()
    worker.rounds = worker.recording_rounds.__enter__()


def recorded_rounds(worker: Any) -> tuple[dict[tuple[int, int], Any], RoundsOf]:
    """Runs in every worker: what prompts retained, and rounds."""
    return worker.recorder.retained, dict(worker.rounds)


def merged(
    ranks: list[tuple[dict[tuple[int, int], Any], RoundsOf]], length: int
) -> tuple[dict[int, set[tuple[int, int]]], list[Round]]:
    """What two ranks retained of a prompt and in its rounds, heads counted over both."""
    at_prompt: dict[int, set[tuple[int, int]]] = defaultdict(set)
    rounds = {position: Round(made.cut, {}) for position, made in ranks[0][1][length].items()}
    for rank, (retained, made) in enumerate(ranks):
        for (prompt_len, layer), entries in retained.items():
            if prompt_len == length:
                at_prompt[layer] |= {(2 * rank + head, token) for head, token in entries}
        for position, each in made[length].items():
            assert each.cut == rounds[position].cut
            for (layer, head), columns in each.columns.items():
                rounds[position].columns[layer, 2 * rank + head] = columns
    return at_prompt, [each for _, each in sorted(rounds.items())]


def test_two_ranks_make_the_cuts_of_the_float64_model(random_model: Path) -> None:
    """In prompts of more than three intervals, and in answers."""
    prompts = random_prompts([40 + 71 * index for index in range(len(ROUND_METHODS))])
    eviction = {"budget": 96, "allow_override": ["method"], "prompt_interval": 64}
    eviction |= {"decode_budget": 96, "decode_interval": 64}
    settings = {"skip_tokenizer_init": True, "max_model_len": 1024, "tensor_parallel_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        with _engine(eviction, 90, model=random_model, **settings) as engine:
            engine.llm.collective_rpc(start_recording_rounds)
            with preempting_all(6, num_tokens=100) as preempted:
                asked = [{"kv_eviction": name} for name in ROUND_METHODS]
                answers = engine.generate(prompts, 180, asked)
            ranks = engine.llm.collective_rpc(recorded_rounds)
    assert preempted
    for name, prompt, answer in zip(ROUND_METHODS, prompts, answers, strict=True):
        at_prompt, rounds = merged(ranks, len(prompt))
        assert rounds
        assert any(made.cut.position < len(prompt) for made in rounds) == (len(prompt) > 192)
        answered = Answered(Model(random_model), prompt, answer, at_prompt, rounds)
        answered.check_tokens()
        answered.check_rounds(MethodCase(name), num_ranks=2)


@BOTH
def test_every_rank_fills_the_same_number_of_pages(
    kind: str, served: Callable[[str], Served]
) -> None:
    for rank in served(kind).ranks:
        for prompt in served(kind).prompts:
            of_prompt = [
                len(e) for (length, _), e in rank.retained.items() if length == len(prompt)
            ]
            num_entries = num_packed(len(prompt)) * BLOCK_SIZE
            assert sum(of_prompt) == num_entries * NUM_LAYERS * NUM_KV_HEADS // 2


@BOTH
def test_requests_were_preempted_and_packed_again(
    kind: str, served: Callable[[str], Served]
) -> None:
    # After the first token alone a prompt is not packed yet.
    in_mid_answer = [count for count in served(kind).preempted if count > 1]
    assert len(in_mid_answer) >= 5
    # A stage may have packed a prompt whose first token was still on its way.
    num_packed_again = {rank.stats["num_evicted"] - len(CASES[kind]) for rank in served(kind).ranks}
    assert len(num_packed_again) == 1
    assert len(in_mid_answer) <= num_packed_again.pop() <= len(CASES[kind])


@BOTH
def test_metrics_count_a_request_once_and_the_entries_of_all_ranks(
    kind: str, served: Callable[[str], Served]
) -> None:
    prompts, metrics = served(kind).prompts, served(kind).metrics
    blocks = [tail_begin(len(p)) // BLOCK_SIZE - num_packed(len(p)) for p in prompts]
    assert metrics["requests"] == len(prompts)
    assert metrics["freed_blocks"] == sum(blocks)
    entries = sum(blocks) * BLOCK_SIZE * NUM_LAYERS * NUM_KV_HEADS
    assert metrics["dropped_entries"] == entries
    assert metrics["freed_bytes"] == entries * 2 * 32 * torch.float32.itemsize


@BOTH
def test_every_rank_binds_its_own_part_of_the_output_projections(
    kind: str, served: Callable[[str], Served], random_model: Path
) -> None:
    model = Model(random_model)
    cpu.load()
    for layer in range(NUM_LAYERS):
        # [hidden_size, heads * head_size] -> [num_kv_heads, head_size, group, hidden_size]
        by_head = model.projection(layer).float().T.view(NUM_KV_HEADS, 2, 32, 256).transpose(1, 2)
        expected = cpu.pack(OutputProjection.of(by_head.contiguous())).packed
        assert expected is not None
        for head in range(NUM_KV_HEADS):
            rank, own_layer, own_head = holder(kind, layer, head)
            packed = served(kind).ranks[rank].projections[own_layer]
            assert torch.equal(packed[own_head], expected[head])
