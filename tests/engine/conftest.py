"""Real engines on the small model, in this process, in float32 so that tokens compare exactly."""

import argparse
import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams, envs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.utils import func_utils
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.quick_starts import look_at_models_here, start_quickly
from tests.engine.random_models import random_gemma3, random_gpt_oss, random_llama, random_persimmon
from tests.engine.server import serving
from tests.marks import starts_engine
from tests.probe_files import probe_of
from tests.process_memory import give_back_freed_memory
from vllm_kvselect.engine.platforms import has_fp8_caches
from vllm_kvselect.kernels import build
from vllm_kvselect.tiny_model import shallow_copy, tiny_model

T = TypeVar("T")
needs_fp8_caches = pytest.mark.skipif(
    not has_fp8_caches(), reason="vLLM has no fp8 cache without AVX-512 or AMX"
)
every_architecture = pytest.mark.parametrize(
    "random_model",
    [random_llama, random_gemma3, random_gpt_oss],
    ids=["full", "windows", "sinks"],
    indirect=True,
)
BLOCK_SIZE = 32
SHALLOW_LAYERS, NUM_TOKENS, MLP_SIZE = 4, 8192, 256
DEFAULTS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": True,
    "skip_tokenizer_init": True,  # it is copied for threads, which takes as long as the engine
}


@dataclass(eq=False)
class Answer:
    """Greedy tokens and their log-probabilities; equal up to float32 rounding of the batch."""

    token_ids: list[int]
    logprobs: list[float]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        # Another batch shape reorders float32 sums: differences of some 1e-6 a layer.
        return self.token_ids == other.token_ids and self.logprobs == pytest.approx(
            other.logprobs, abs=1e-3
        )


class Engine:
    """A vLLM engine in this process, with access to its scheduler and its worker."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    @property
    def impls(self) -> list[Any]:
        """Attention impls of the layers, in order."""
        context = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        return [layer.impl for layer in context.values()]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 32,
        extra_args: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[Answer]:
        """Greedy answers to the prompts, all in one batch, each with its own `extra_args`."""
        return [
            Answer(
                list(o.token_ids),
                [e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)],
            )
            for o in self.outputs(prompts, max_tokens, extra_args, logprobs=0)
        ]

    def generate_alone(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 32,
        extra_args: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[Answer]:
        """Greedy answers to the prompts, one after the other."""
        settings = extra_args or [None] * len(prompts)
        return [
            self.generate([prompt], max_tokens, [own])[0]
            for prompt, own in zip(prompts, settings, strict=True)
        ]

    def outputs(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 32,
        extra_args: Sequence[dict[str, Any] | None] | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """vLLM's completions, one of each prompt."""
        results = self.results(prompts, max_tokens, extra_args, **sampling)
        return [result.outputs[0] for result in results]

    def results(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 32,
        extra_args: Sequence[dict[str, Any] | None] | None = None,
        **sampling: Any,
    ) -> list[Any]:
        params = [
            self.sampling(max_tokens, own, **sampling)
            for own in extra_args or [None] * len(prompts)
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False)

    @staticmethod
    def sampling(
        max_tokens: int, extra_args: dict[str, Any] | None, **sampling: Any
    ) -> SamplingParams:
        """Greedy, for a fixed number of tokens."""
        settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **sampling}
        return SamplingParams(max_tokens=max_tokens, extra_args=extra_args, **settings)

    def record_hits(self) -> list[int]:
        """Tokens that every lookup from now on finds in the prefix cache, as they are counted."""
        hits: list[int] = []
        manager = self.scheduler.kv_cache_manager
        lookup = manager.get_computed_blocks

        def record(request: Any) -> Any:
            result = lookup(request)
            hits.append(result[1])
            return result

        manager.get_computed_blocks = record
        return hits

    def record_steps(self, read: Callable[[Any], T]) -> list[T]:
        """What is read of every step, once it is scheduled, from now on."""
        found: list[T] = []
        schedule = self.scheduler.schedule

        def record(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            found.append(read(output))
            return output

        self.scheduler.schedule = record  # type: ignore[method-assign]
        return found

    def record_blocks(self) -> list[int]:
        """Blocks in use after every step from now on."""
        return self.record_steps(lambda _: self.blocks_in_use())

    def blocks_in_use(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def engine_settings(
    eviction: dict[str, Any] | None, num_blocks: int, *, model: Path, **settings: Any
) -> dict[str, Any]:
    """What an engine is given, beside its model."""
    settings = {**DEFAULTS, **settings}
    if eviction is not None:
        eviction = {"method": "adakv-perturb", **eviction}
        # The tiny model's probe the package has; weights without a file have none. (It is not asked
        # for where a test has a cache of its own: it would be made once more.)
        if "probe" not in eviction and any(model.glob("*.safetensors")) and model != tiny_model():
            eviction = {"probe": str(probe_of(model)), **eviction}
        settings["additional_config"] = {"kv_eviction": eviction}
    if "kv_cache_memory_bytes" in settings:
        return settings
    config = json.loads((model / "config.json").read_text())
    element_bytes = 4 if settings["dtype"] == "float32" else 2
    if settings.get("kv_cache_dtype", "auto").startswith("fp8"):
        element_bytes = 1
    entry_bytes = 2 * config["head_dim"] * element_bytes
    entries = config["num_hidden_layers"] * config["num_key_value_heads"] * BLOCK_SIZE
    ranks = ("tensor_parallel_size", "pipeline_parallel_size")
    block_bytes = entries * entry_bytes // math.prod(settings.get(name, 1) for name in ranks)
    return {"kv_cache_memory_bytes": num_blocks * block_bytes, **settings}


@starts_engine
@contextmanager
def _engine(
    eviction: dict[str, Any] | None, num_blocks: int, *, model: Path, **settings: Any
) -> Iterator[Engine]:
    _kept.give_back()
    start_quickly()
    given = engine_settings(eviction, num_blocks, model=model, **settings)
    try:
        engine = Engine(LLM(str(model), **given))
    except BaseException:  # what it had begun would be in the way of the next one
        cleanup_dist_env_and_memory()
        raise
    envs.disable_envs_cache()  # other tests of this process set variables
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine.llm  # the test still has the engine
        # It is asked about methods of classes that vLLM makes for each engine, and so keeps two
        # copies of the tokenizer of each, some 40 MB.
        func_utils._supports_kw.cache_clear()
        cleanup_dist_env_and_memory()
        give_back_freed_memory()


class _Kept:
    """The engine that goes from test to test, as long as they ask for the same; there is one."""

    def __init__(self) -> None:
        self._asked, self._stack = "", contextlib.ExitStack()
        self._engine: Engine | None = None

    def engine(self, eviction: dict[str, Any], num_blocks: int, **settings: Any) -> Engine:
        asked = repr((eviction, num_blocks, settings))
        if self._engine is None or asked != self._asked:
            started = _engine(eviction, num_blocks, **settings)
            self._engine, self._asked = self._stack.enter_context(started), asked
        assert self._engine.scheduler.reset_prefix_cache()  # nobody is served
        self._engine.worker.reset_kv_eviction_stats()
        # What `record_hits` and `record_steps` have left.
        vars(self._engine.scheduler.kv_cache_manager).pop("get_computed_blocks", None)
        vars(self._engine.scheduler).pop("schedule", None)
        return self._engine

    def give_back(self) -> None:
        self._engine = None
        self._stack.close()


_kept = _Kept()


@starts_engine
@contextmanager
def _sharing(eviction: dict[str, Any], num_blocks: int, **settings: Any) -> Iterator[Engine]:
    try:
        yield _kept.engine(eviction, num_blocks, **settings)
    except BaseException:  # who knows what it is left in
        _kept.give_back()
        raise


@contextmanager
def preempting_all(num_answering: int, num_tokens: int = 2) -> Iterator[list[int]]:
    """Preempts all running requests once, when so many of them have generated so many tokens.

    Yields the numbers of tokens that they had generated.
    """
    num_generated: list[int] = []
    schedule = Scheduler.schedule

    def schedule_and_preempt(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        generated = [r.num_tokens - r.num_prompt_tokens for r in scheduler.running]
        if not num_generated and sum(count >= num_tokens for count in generated) >= num_answering:
            num_generated.extend(generated)
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(scheduler, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", schedule_and_preempt)
        yield num_generated


EngineFactory = Callable[..., Any]


@contextmanager
def engines_of(model: Path) -> Iterator[EngineFactory]:
    """Engines of a model without a tokenizer, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield partial(_engine, model=model, block_size=BLOCK_SIZE, max_model_len=1024)


@pytest.fixture
def start_full_engine(monkeypatch: pytest.MonkeyPatch) -> EngineFactory:
    """`with start_full_engine(eviction, num_blocks, **vllm_settings) as engine:`."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return partial(_engine, model=tiny_model())


@pytest.fixture
def start_engine(monkeypatch: pytest.MonkeyPatch, shallow_model: Path) -> EngineFactory:
    """The same with the small model's first layers: many steps in little time."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return partial(_engine, model=shallow_model)


@pytest.fixture
def start_small(monkeypatch: pytest.MonkeyPatch) -> EngineFactory:
    """`with start_small(eviction, model=folder) as engine:`, with room for a few short prompts.

    It has the probe that the configuration names, or that vLLM would find.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def start(eviction: dict[str, Any], *, model: Path, **settings: Any) -> Any:
        eviction = {"budget": 96, "probe": None, **eviction}
        sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
        return _engine(eviction, 0, model=model, **sizes | settings)

    return start


@pytest.fixture(scope="module")
def random_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of full attention, or of another architecture that a test asks for."""
    make = getattr(request, "param", random_llama)
    return make(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture(scope="module")
def start(random_model: Path) -> Iterator[EngineFactory]:
    """`with start(eviction, num_blocks, **vllm_settings) as engine:` of this model."""
    with engines_of(random_model) as factory:
        yield factory


@pytest.fixture
def share_engine(start_engine: EngineFactory, shallow_model: Path) -> EngineFactory:
    """The same engine as of the test before, if that asked for the same; with nothing cached.

    Tests that share one are in an xdist group, and leave it without requests.
    """
    return partial(_sharing, model=shallow_model)


@pytest.fixture(scope="session", autouse=True)
def _engines() -> Iterator[None]:
    look_at_models_here()
    yield
    _kept.give_back()


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model cut down to its first layers, its commonest tokens and narrow MLPs.

    Real attention, real tokens, a real engine: with all of the rest, what it computes beside
    attention takes several times as long.
    """
    folder = tmp_path_factory.mktemp("shallow") / "model"
    return _narrowed(shallow_copy(tiny_model(), SHALLOW_LAYERS, folder))


def _narrowed(folder: Path) -> Path:
    """Takes tokens and channels of MLPs out of a model's weights; its tokenizer keeps all."""
    config = json.loads((folder / "config.json").read_text())
    narrow = {"vocab_size": NUM_TOKENS, "intermediate_size": MLP_SIZE}
    (folder / "config.json").write_text(json.dumps(config | narrow))
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "embed_tokens" in name or "lm_head" in name:
            weights[name] = weight[:NUM_TOKENS].clone()
        elif "gate_proj" in name or "up_proj" in name:
            weights[name] = weight[:MLP_SIZE].clone()
        elif "down_proj" in name:
            weights[name] = weight[:, :MLP_SIZE].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of which nobody has a probe."""
    # Where the kernels are follows from the same variable: they would be compiled once more.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(build.library_path().parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return random_llama(tmp_path / "llama")


@pytest.fixture(scope="session")
def persimmon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that vLLM runs through transformers, which does not say what its projection is.

    Made once a process: when vLLM has loaded such a model, transformers can make no other one.
    """
    return random_persimmon(tmp_path_factory.mktemp("persimmon"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that lets requests choose; its tests are in the xdist group `server`."""
    options = ["--kv-eviction", "adakv-perturb", "--kv-eviction-budget", "256"]
    options += ["--kv-eviction-allow-override", "method,budget"]
    with serving(tmp_path_factory.mktemp("server"), *options) as url:
        yield url


@pytest.fixture(scope="session")
def text_tokens() -> list[int]:
    """A few tens of thousands of tokens of real text, but for rare ones: Python source."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model()))
    tokens = tokenizer.encode(inspect.getsource(argparse) + inspect.getsource(inspect))
    return [token for token in tokens if token < NUM_TOKENS]


@pytest.fixture(scope="session")
def make_prompts(text_tokens: list[int]) -> Callable[..., list[list[int]]]:
    """`make_prompts(lengths)`: prompts of different text, one of each length."""

    def make(lengths: Sequence[int], skip: int = 0) -> list[list[int]]:
        starts = range(skip, len(text_tokens), 977)
        return [text_tokens[start : start + n] for start, n in zip(starts, lengths, strict=False)]

    return make
