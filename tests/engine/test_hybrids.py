"""Models with other layers beside full attention, whose entries are the only ones that drop."""

import re
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.lfm2 import Lfm2Attention

from tests.engine.adapters import RANK, random_adapter
from tests.engine.all_methods import EVICTION, check_method, serve_all_methods
from tests.engine.conftest import Answer, Engine, EngineFactory, engines_of
from tests.engine.float64 import WINDOW, num_packed, tail_begin
from tests.engine.hybrid_model import HybridModel
from tests.engine.random_hybrids import (
    falcon_h1,
    gemma4,
    granite_h,
    lfm2,
    mended_lfm2_attention,
    nemotron_h,
    qwen3_next,
    saved,
)
from tests.engine.random_models import SHAPE, random_prompts
from tests.load.mixture import (
    DENSE,
    MAX_MODEL_LEN,
    SETTINGS,
    WITHOUT_TOKENIZER,
    assert_as_alone,
    draw,
    serve,
    serve_alone,
)
from tests.method_cases import MethodCase
from tests.probe_files import probe_of
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager

pytestmark = pytest.mark.xdist_group("hybrids")
PAGE_SIZE = 32
NOTHING_DROPPED = {"kv_eviction": "none"}
CASES = [MethodCase(name) for name in ("adakv-perturb", "snapkv", "knorm", "layer-keydiff")]
PROBE = MethodCase("layer-probe")
BEHIND_GATES = [MethodCase(name) for name in ("adakv", "snapkv", "knorm", "layer-keydiff")]


class Family(NamedTuple):
    """A family of models.

    Attributes:
        make: Makes one.
        full_attention: Its layers that drop entries.
        block_size: Tokens of a block, which is as large as a state.
        caches: Whether prompts are cached.
        aligned_hits: Of what hits are multiples.
        token_bytes: Bytes of a token in its layers of a group; groups lie one over the other.
        dtype: In which it is served.
        has_probe: Whether it gets one.
    """

    make: Any
    full_attention: list[int]
    block_size: int
    caches: bool = False
    aligned_hits: int = 32
    token_bytes: int = 2048
    dtype: str = "float32"
    has_probe: bool = True

    @property
    def is_rough(self) -> bool:
        """Whether vLLM serves it in bfloat16 alone."""
        return self.dtype == "bfloat16"

    @property
    def cases(self) -> list[MethodCase]:
        """Methods: behind a gate no norms of projected values are known."""
        cases = BEHIND_GATES if self.is_rough else CASES
        return [*cases, PROBE] if self.has_probe else cases

    def assert_same(self, answers: list[Answer], expected: list[Answer]) -> None:
        """Compares answers that were computed in other batches, or from hits."""
        if not self.is_rough:
            assert answers == expected
            return
        for answer, other in zip(answers, expected, strict=True):
            pairs = zip(answer.token_ids, other.token_ids, strict=True)
            num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert num_same > 2
            assert answer.logprobs[:num_same] == pytest.approx(other.logprobs[:num_same], abs=0.2)


FAMILIES = {
    "lfm2": Family(lfm2, [2, 5], 32, caches=True),
    "gemma4": Family(
        gemma4, [2, 5], 32, caches=True, aligned_hits=64, token_bytes=4096, has_probe=False
    ),
    "gemma4_sharing": Family(
        partial(gemma4, 3), [2, 5], 32, True, aligned_hits=64, token_bytes=4096, has_probe=False
    ),
    "granite": Family(granite_h, [1, 3], 96),
    "falcon": Family(falcon_h1, [0, 1], 96),
    "nemotron": Family(nemotron_h, [2, 5], 96),
    "qwen3_next": Family(qwen3_next, [2, 5], 96, True, 96, 1024, "bfloat16"),
}


class Hybrid(NamedTuple):
    """A model, and what starts engines of it."""

    family: Family
    folder: Path
    start: EngineFactory

    @property
    def block_bytes(self) -> int:
        """What a block takes."""
        return self.family.block_size * self.family.token_bytes


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hybrid]:
    family = FAMILIES[request.param]
    dtype = getattr(torch, family.dtype)
    folder = saved(family.make, tmp_path_factory.mktemp(request.param) / request.param, dtype)

    def start(eviction: dict[str, Any] | None, num_blocks: int = 0, **settings: Any) -> Any:
        if eviction is not None:
            model = settings.get("model", folder)
            probe = str(probe_of(model)) if family.has_probe else None
            ours = {"method": family.cases[0].method, "probe": probe, "check_integrity": True}
            eviction = ours | eviction
        # What lies beside takes blocks, too.
        num_bytes = max(num_blocks, 80) * family.block_size * family.token_bytes
        defaults = {"enable_prefix_caching": family.caches, "dtype": family.dtype}
        defaults["mamba_ssm_cache_dtype"] = "float32"  # else vLLM goes by the processor
        settings = {"kv_cache_memory_bytes": num_bytes, **defaults, **settings}
        return start_engine(eviction, num_blocks, **settings)

    with engines_of(folder) as start_engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lfm2Attention, "forward", mended_lfm2_attention)
        yield Hybrid(family, folder, start)


caching = pytest.mark.parametrize(
    "hybrid", ["lfm2", "gemma4", "gemma4_sharing", "qwen3_next"], indirect=True
)
"""Of Mamba 2 vLLM's CPU code caches no prompts: it has no states inside a chunk."""


def test_full_attention_drops_as_the_reference_and_states_stay(hybrid: Hybrid) -> None:
    family, cases = hybrid.family, hybrid.family.cases
    served = serve_all_methods(hybrid.start, cases)
    reference = HybridModel, family.is_rough
    for index in range(len(cases)):
        check_method(index, served, hybrid.folder, family.full_attention, cases, *reference)


def headwise(engine: Engine) -> HeadwiseManager:
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    (manager,) = (each for each in managers if isinstance(each, HeadwiseManager))
    return manager


def test_nothing_dropped_is_stock_and_freed_blocks_are_those_of_whole_pages(hybrid: Hybrid) -> None:
    prompts = random_prompts([40, 150, 500])
    with hybrid.start(None, 40) as engine:
        expected = engine.generate(prompts, 20)
    with hybrid.start({**EVICTION, "method": "none"}, 40, disable_log_stats=False) as engine:
        assert engine.generate(prompts, 20) == expected
        tables = headwise(engine).req_to_blocks
        held = engine.record_steps(
            lambda _: [sum(block.is_null for block in table) for table in tables.values()]
        )
        engine.generate(prompts[2:], 2, [{"kv_eviction": "snapkv"}])
        assert headwise(engine).sizes == (hybrid.family.block_size, PAGE_SIZE)
        assert engine.blocks_in_use() == 0
        counted = {metric.name: metric for metric in engine.llm.get_metrics()}
    # What is packed ends with a whole block, and the tail begins with a page.
    block_size, tail = hybrid.family.block_size, tail_begin(500)
    num_freed = (tail // block_size * block_size - num_packed(500) * PAGE_SIZE) // block_size
    assert max(held) == [num_freed]
    num_dropped = tail - num_packed(500) * PAGE_SIZE
    assert num_dropped == 320
    num_heads = SHAPE["num_key_value_heads"] * len(hybrid.family.full_attention)
    for name, number in {
        "dropped_entries": num_dropped * num_heads,
        "freed_blocks": num_freed,
        "freed_bytes": num_freed * block_size * hybrid.family.token_bytes,
    }.items():
        assert counted[f"vllm:kv_eviction_{name}"].value == number
    assert counted["vllm:kv_eviction_retained_ratio"].sum == pytest.approx(1 - num_dropped / 500)


@pytest.mark.parametrize("hybrid", ["gemma4_sharing"], indirect=True)
def test_layers_that_read_others_caches_prefill_densely(hybrid: Hybrid) -> None:
    with (
        pytest.raises(ConfigError, match="not tried with layers that read other layers' caches"),
        hybrid.start({"prefill": "critiprefill"}, 40),
    ):
        pass


@pytest.mark.parametrize("hybrid", ["granite"], indirect=True)
def test_an_adapters_requests_are_those_of_its_merged_weights(
    hybrid: Hybrid, tmp_path: Path
) -> None:
    weights = load_file(hybrid.folder / "model.safetensors")
    adapted = re.compile(r"\.self_attn\.[qkvo]_proj\.weight")
    sizes = {
        name.removesuffix(".weight"): (len(weight), weight.shape[1])
        for name, weight in weights.items()
        if adapted.search(name)
    }
    added = random_adapter(tmp_path / "adapter", sizes)
    shutil.copytree(hybrid.folder, tmp_path / "merged")
    merged = {name: w + added.get(name.removesuffix(".weight"), 0) for name, w in weights.items()}
    save_file(merged, tmp_path / "merged" / "model.safetensors", {"format": "pt"})

    prompts, settings = random_prompts([250, 500]), [{"kv_eviction": case.method} for case in CASES]
    with hybrid.start(EVICTION, 80, enable_lora=True, max_lora_rank=RANK) as engine:
        others = engine.generate(prompts, 12, settings[:2])
        asked = [engine.sampling(12, each, logprobs=0) for each in settings[:2]]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        found = engine.llm.generate(inputs, asked, use_tqdm=False, lora_request=request)
    with hybrid.start(EVICTION, 80, model=tmp_path / "merged") as engine:
        expected = [list(answer.token_ids) for answer in engine.generate(prompts, 12, settings[:2])]
    assert [list(result.outputs[0].token_ids) for result in found] == expected
    assert [answer.token_ids for answer in others] != expected


@pytest.mark.load  # tests/engine/test_ranks.py runs each time
@pytest.mark.parametrize("hybrid", ["granite"], indirect=True)
def test_two_ranks_answer_as_one(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Heads that share pages share them with those of their rank, so these do not share.
    answers, settings = [], [{"kv_eviction": name} for name in ("snapkv", "knorm", "keydiff")]
    for num_ranks in (1, 2):
        with hybrid.start(EVICTION, 80, tensor_parallel_size=num_ranks) as engine:
            answers.append(engine.generate(random_prompts([333, 500, 420]), 12, settings))
            assert engine.llm.collective_rpc(num_evicted) == [len(settings)] * num_ranks
    assert answers[0] == answers[1]


def num_evicted(worker: Any) -> int:
    """Runs in every worker."""
    return getattr(worker, "worker", worker).kv_eviction_stats()["num_evicted"]


BOUNDED = {
    "method": "adakv",
    "budget": 96,
    "prompt_interval": 64,
    "decode_budget": 96,
    "decode_interval": 64,
    "allow_override": ["method"],
}


@pytest.mark.parametrize("hybrid", ["lfm2", "gemma4", "granite"], indirect=True)
def test_who_would_fit_without_states_and_windows_alone_is_refused(hybrid: Hybrid) -> None:
    """It would wait for ever: their blocks are of the same pool."""
    prompt, short = random_prompts([900, 300])
    most = -(-1000 // hybrid.family.block_size)
    in_pool = {"kv_cache_memory_bytes": (most + 1) * hybrid.block_bytes}  # one is the null block
    with hybrid.start(BOUNDED, max_num_batched_tokens=128, **in_pool) as engine:
        (answer,) = engine.generate([prompt], 20)
        assert len(answer.token_ids) == 20
        with pytest.raises(ValueError, match=rf"needs {most} blocks at once, and the KV cache has"):
            engine.generate([short], 700, [NOTHING_DROPPED])
        assert engine.generate([short], 3, [NOTHING_DROPPED])
        assert engine.blocks_in_use() == 0


@caching
def test_the_same_request_again_finds_entries_and_states_at_once(hybrid: Hybrid) -> None:
    prompts = random_prompts([500, 420])
    with hybrid.start(EVICTION, 80) as engine:
        hits = engine.record_hits()
        first = engine.generate_alone(prompts, 40)
        hybrid.family.assert_same(engine.generate_alone(prompts, 40), first)
        # One that drops nothing finds what others computed before they dropped.
        engine.generate(prompts, 1, [NOTHING_DROPPED] * 2)
        hybrid.family.assert_same(engine.generate(prompts, 40), first)
    size, aligned = hybrid.family.block_size, hybrid.family.aligned_hits
    most = [min(len(p) // size - 1, (len(p) - WINDOW) // size) * size for p in prompts]
    found = [length - length % aligned for length in most]
    stock = [(len(prompt) - 1) // aligned * aligned for prompt in prompts]
    assert hits == [0, 0, *found, *stock, *found]


@caching
def test_states_after_dropping_are_found_by_nobody(hybrid: Hybrid) -> None:
    """States of an answer depend on what full attention dropped."""
    prompt, *rest = random_prompts([500, 50, 60])
    with hybrid.start(EVICTION, 80) as engine:
        (answer,) = engine.generate([prompt], 100)
        turns: list[Any] = [[*prompt, *answer.token_ids, *more] for more in rest]
        engine.generate([turns[0]], 1, [NOTHING_DROPPED])
        (again,) = engine.generate([turns[1]], 20, [NOTHING_DROPPED])
    with hybrid.start(None, 80, enable_prefix_caching=False) as engine:
        hybrid.family.assert_same([again], engine.generate([turns[1]], 20))


SETTINGS_OF_HYBRIDS = [
    settings
    for settings in SETTINGS
    if settings.keys().isdisjoint(("kv_prefill", "kv_eviction_context"))
]
EXACT = [name for name, family in FAMILIES.items() if not family.is_rough]


@pytest.mark.parametrize(
    ("hybrid", "num_requests"),
    [
        *((name, 40) for name in ("lfm2", "falcon")),
        *(pytest.param(name, 500, marks=pytest.mark.load) for name in EXACT),
    ],
    indirect=["hybrid"],
)
def test_mixed_requests_are_answered_as_alone(hybrid: Hybrid, num_requests: int) -> None:
    """In a crowded pool, with clients that leave and others that are preempted all the time."""
    (text,) = random_prompts([8000])
    distinct = max(30, num_requests // 5)
    drawn: Any = {"kinds": WITHOUT_TOKENIZER, "settings": SETTINGS_OF_HYBRIDS}
    requests = draw(text, num_requests, distinct, 5, share_leaving=0.2, **drawn)
    limits: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "disable_log_stats": False}
    with hybrid.start(DENSE, 80, enable_prefix_caching=False, **limits) as engine:
        expected = serve_alone(engine.llm, requests)
    crowded = {"max_num_batched_tokens": 150, "max_num_seqs": 8, **limits}
    most = -(-MAX_MODEL_LEN // hybrid.family.block_size)
    crowded["kv_cache_memory_bytes"] = (3 * most + 4) * hybrid.block_bytes
    with hybrid.start(DENSE, **crowded) as engine:
        service = serve(engine.llm, requests, 16, seed=5, preempt=0.02, stream=True)
        assert engine.blocks_in_use() == 0
        assert engine.worker.kv_eviction_stats()["num_evicted"] > num_requests / 3
    assert_as_alone(requests, expected, service.answers)
    for event in ("preemptions", "resets", "left"):
        assert service.seen[event] > 0, service.seen
