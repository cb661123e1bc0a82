"""What eviction cannot honour is refused at start-up: the value, the reason, what to do."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from tests.engine import flash_attention
from tests.engine.configurations import EVICTION, CudaPlatform, create, drafting, set_to, written
from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine import platforms
from vllm_kvselect.engine import start_up as report
from vllm_kvselect.engine.cuda import backends
from vllm_kvselect.engine.frontend import arguments
from vllm_kvselect.engine.frontend.arguments import choose_scheduler
from vllm_kvselect.engine.frontend.checks import refuse_unsupported
from vllm_kvselect.engine.platforms import PLATFORMS
from vllm_kvselect.engine.scheduler.cut_scheduler import CutAsyncScheduler, CutScheduler
from vllm_kvselect.registry import METHODS
from vllm_kvselect.tiny_model import tiny_model

STORED: dict[str, Any] = {"context": 512, "method": "layer-keydiff", "budget": 0.25}
PAPERS = {"kv_eviction": {"method": "adakv-perturb"}}


@pytest.mark.parametrize(
    ("eviction", "settings", "message"),
    [
        ({"context": None}, {}, "no request may mark a context: add --kv-eviction-context"),
        ({"allow_override": ["prefill"]}, {}, "dense: leave --kv-prefill out"),
        ({"prefill": "critiprefill"}, {}, "prefills must be dense"),
        ({}, {"enable_prefix_caching": False}, "prefix caching must be on"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline parallelism is not supported"),
        ({}, {"block_size": 64}, "as large as pages: set --block-size to 32"),
        ({}, {"load_format": "dummy"}, "load format 'dummy' have no fingerprint"),
        ({"context_store": __file__}, {}, "is no folder that can be read.*name another"),
    ],
)
def test_contexts_that_cannot_be_stored(
    eviction: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    own = {**STORED, "context_store": str(tmp_path / "contexts"), **eviction}
    with pytest.raises(ConfigError, match=message):
        create(own, **settings)


def test_a_server_that_stores_contexts_is_accepted(tmp_path: Path) -> None:
    create({**STORED, "context_store": str(tmp_path / "contexts"), "context_store_bytes": 10**9})
    assert (tmp_path / "contexts").is_dir()


@pytest.mark.parametrize(
    ("eviction", "message"),
    [
        ({"method": "snapkw"}, r"method = 'snapkw'.*'none', 'layer-probe', 'layer-defensivekv'"),
        ({"method": "layer-kvzip"}, r"method = 'layer-kvzip' is not served, only measured off"),
        ({"budget": 0}, r"budget = 0 is not accepted.*at least 1.*method 'none'"),
        ({"budget": 63}, r"budget = 63 retains 63.*at least 64.*of 32 and 1 page\(s\) of 32"),
        ({"budget": 0.01}, r"budget = 0\.01 retains 21 entries of 2048 tokens; at least 64"),
        ({"decode_budget": 40}, r"decode_budget = 40 is too small: at least 64"),
        ("adakv", r"additional_config\['kv_eviction'\] = 'adakv' must be a mapping"),
    ],
)
def test_values_that_are_not_accepted(eviction: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(eviction)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_accepted_and_gets_our_scheduler(name: str) -> None:
    scheduling = create({"method": name}).scheduler_config
    assert scheduling.get_scheduler_cls() is CutScheduler
    scheduling.scheduler_cls, scheduling.async_scheduling = None, True  # not on CPU
    choose_scheduler(scheduling, EvictionConfig(method=name))
    assert scheduling.get_scheduler_cls() is CutAsyncScheduler


@pytest.mark.parametrize(
    "eviction",
    [
        {},
        {"method": "pyramidkv"},
        {"context": 500},
        {"decode_budget": 512},
        {"check_integrity": True},
        {"method": "none", "prefill": "critiprefill"},
        {"method": "none", "allow_override": ["method"]},
    ],
)
def test_another_scheduler_is_refused(eviction: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"scheduler_cls = 'vllm.*leave one of them out"):
        create(eviction, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")


def test_a_pool_cannot_span_the_stages_of_a_pipeline() -> None:
    create({"method": "pyramidkv"}, tensor_parallel_size=3)
    create({"allow_override": ["method"]}, pipeline_parallel_size=2)
    message = r"'pyramidkv' shares pages between layers, which pipeline parallelism puts into"
    with pytest.raises(ConfigError, match=message):
        create({"method": "pyramidkv"}, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("method", "path", "value", "eviction", "message"),
    [
        ("medusa", "", None, {}, "by 'medusa' is not supported here; choose 'ngram' or 'draft_mo"),
        (
            "eagle",
            "speculative_config.parallel_drafting",
            True,
            {},
            "several tokens at once .* are",
        ),
        ("draft_model", "parallel_config.pipeline_parallel_size", 2, {}, "beside pipeline paral"),
        ("eagle3", "lora_config", SimpleNamespace(), {}, "embeddings .* beside --enable-lora are"),
        ("eagle3", "", None, {"context_store": "contexts"}, "must have no layers: choose 'ngram'"),
    ],
)
def test_what_drafters_exclude(
    method: str,
    path: str,
    value: Any,
    eviction: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    vllm_config = drafting("ngram")
    refuse_unsupported(vllm_config, EVICTION)
    vllm_config.speculative_config.method = method
    if method != "medusa":
        refuse_unsupported(vllm_config, EVICTION)
    if path:
        set_to(vllm_config, path, value)
    with pytest.raises(ConfigError, match=message):
        refuse_unsupported(vllm_config, EvictionConfig(**{"method": "adakv-perturb", **eviction}))


def test_the_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match=r"Rust front end.*is not supported; switch it off"):
        create({})


def test_kv_connectors_are_refused() -> None:
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(ConfigError, match=r"KV connectors.*is not supported; switch it off"):
        create({}, kv_transfer_config=connector)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 48}, "block_size = 48 is not accepted; use a multiple of 32"),
        ({"kv_cache_dtype": "fp8_inc"}, "--kv-cache-dtype fp8_inc is not supported"),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            "an fp8 KV cache on CPU is of all layers: leave --kv-cache-dtype-skip-layers out;",
        ),
    ],
)
def test_settings_of_vllm_that_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create({}, **settings)


def test_fp8_caches_that_vllm_has_no_kernel_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_avx512 in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda has=has_avx512: has)
        for cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2") if has_avx512 else ():
            create({}, kv_cache_dtype=cache_dtype)
    with pytest.raises(ConfigError, match=r"needs a processor with AVX-512 or AMX; change it, or"):
        create({}, kv_cache_dtype="fp8")
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 80}
    odd = written(tmp_path, **kind)
    with pytest.raises(ConfigError, match=r"needs heads whose size is divisible by 32"):
        create({}, kv_cache_dtype="fp8", **odd)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decode_context_parallel_size", 2, "decode context parallelism"),
        ("prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("distributed_executor_backend", "ray", "does not support Ray on 'cpu'"),
        ("distributed_executor_backend", "my.Executor", "choose 'mp' or 'ray'"),
        ("worker_cls", "my.Worker", "worker_cls = 'my.Worker'"),
    ],
)
def test_parallelism_and_other_workers_are_refused(name: str, value: Any, message: str) -> None:
    vllm_config = create({"method": "none"}, block_size=32)
    refuse_unsupported(vllm_config, EVICTION)
    setattr(vllm_config.parallel_config, name, value)
    with pytest.raises(ConfigError, match=message):
        refuse_unsupported(vllm_config, EVICTION)


def test_ray_is_accepted_where_vllm_supports_it_and_not_its_older_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm_config = create({"method": "none"}, block_size=32)
    vllm_config.parallel_config.distributed_executor_backend = "ray"
    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    refuse_unsupported(vllm_config, EVICTION)
    chosen = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": lambda: False}  # unknown to vLLM 0.33
    monkeypatch.setattr(envs, "environment_variables", {**envs.environment_variables, **chosen})
    with pytest.raises(ConfigError, match=r"older Ray executor.*unset VLLM_USE_RAY_V2"):
        refuse_unsupported(vllm_config, EVICTION)


def test_model_runner_v2_is_refused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # as in an image with triton-cpu
    assert create({"method": "none"}).use_v2_model_runner
    with pytest.raises(ConfigError, match=r"model runner V2.*set VLLM_USE_V2_MODEL_RUNNER=0"):
        create({})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    create({})


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """A configuration as vLLM makes it on CUDA, where our checks see it."""
    config = create({"allow_override": ["method"]}, block_size=32, dtype="bfloat16")
    config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    config.cache_config.block_size = 16
    config.scheduler_config.scheduler_cls = None
    monkeypatch.setattr(platforms, "current_platform", CudaPlatform)
    monkeypatch.setattr(backends, "current_platform", CudaPlatform)
    monkeypatch.setattr(report, "current_platform", CudaPlatform)
    flash_attention.install(monkeypatch)  # what vLLM's backends ask of FlashAttention 3
    return config


@pytest.mark.parametrize("asked", [None, *PLATFORMS["cuda"].backends])
def test_cuda_gets_its_worker_and_flash_attention_or_what_the_user_asked_for(
    asked: AttentionBackendEnum | None, on_cuda: VllmConfig
) -> None:
    on_cuda.cache_config.cache_dtype = "fp8"
    on_cuda.attention_config.backend = asked
    engine_args = EngineArgs(str(tiny_model()), additional_config=PAPERS)
    num_bytes = report.block_bytes(on_cuda)
    arguments.after_engine_config(engine_args, on_cuda)
    module, _, name = on_cuda.parallel_config.worker_cls.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), Worker)
    backend = on_cuda.attention_config.backend
    assert backend is (asked or AttentionBackendEnum.FLASH_ATTN)
    ours = resolve_obj_by_qualname(PLATFORMS["cuda"].backends[backend])
    assert issubclass(ours, backend.get_class())
    on_cuda.cache_config.cache_dtype = "bfloat16"
    assert report.block_bytes(on_cuda) == 2 * num_bytes


def test_chunks_that_a_graph_would_hide_are_refused(on_cuda: VllmConfig) -> None:
    scheduling = on_cuda.scheduler_config
    scheduling.long_prefill_token_threshold = 2
    refuse_unsupported(on_cuda, EVICTION)  # without graphs
    on_cuda.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold = 2 .* set it to 3"):
        refuse_unsupported(on_cuda, EVICTION)
    scheduling.long_prefill_token_threshold = 3
    refuse_unsupported(on_cuda, EVICTION)


def on_a_card(patch: pytest.MonkeyPatch, major: int, minor: int, fa_version: int) -> None:
    """Puts a card under vLLM's checks, with what its FlashAttention takes."""
    capability = staticmethod(lambda: DeviceCapability(major, minor))
    patch.setattr(CudaPlatform, "get_device_capability", capability)
    patch.setattr(flash_attn, "get_flash_attn_version", lambda **_: fa_version)
    patch.setattr(flash_attn, "is_flash_attn_varlen_func_available", lambda: True)
    for feature in ("kv_cache_dtype", "sinks"):
        name = f"flash_attn_supports_{feature}"
        patch.setattr(flash_attn, name, lambda *_, **__: fa_version > 2, raising=False)


@pytest.mark.parametrize(
    ("card", "change", "expected"),
    [
        ((8, 0, 2), {}, "FLASH_ATTN"),
        ((8, 0, 2), {"cache_dtype": "fp8"}, "TRITON_ATTN"),
        ((8, 9, 2), {"cache_dtype": "fp8"}, "TRITON_ATTN"),
        ((9, 0, 3), {"cache_dtype": "fp8"}, "FLASH_ATTN"),
        ((8, 0, 2), {"model_type": "gpt_oss"}, "TRITON_ATTN"),
        ((9, 0, 3), {"model_type": "gpt_oss"}, "FLASH_ATTN"),
        ((9, 0, 3), {"dtype": torch.float32}, "TRITON_ATTN"),
        ((10, 0, 4), {}, "TRITON_ATTN"),  # its strides are not shown to be wide enough
        ((10, 0, 4), {"cache_dtype": "fp8"}, "TRITON_ATTN"),
        ((10, 0, 4), {"model_type": "gpt_oss"}, "TRITON_ATTN"),
        ((10, 0, 2), {}, "FLASH_ATTN"),  # --attention-config.flash_attn_version 2
        ((12, 0, 2), {"cache_dtype": "fp8"}, "TRITON_ATTN"),
    ],
)
def test_the_first_backend_that_takes_the_model_is_taken(
    card: tuple[int, int, int],
    change: dict[str, Any],
    expected: str,
    on_cuda: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_card(monkeypatch, *card)
    on_cuda.cache_config.cache_dtype = change.get("cache_dtype", "auto")
    monkeypatch.setattr(on_cuda.model_config, "dtype", change.get("dtype", torch.bfloat16))
    if "model_type" in change:
        monkeypatch.setattr(on_cuda.model_config.hf_text_config, "model_type", "gpt_oss")
    engine_args = EngineArgs(str(tiny_model()), additional_config=PAPERS)
    arguments.after_engine_config(engine_args, on_cuda)
    assert on_cuda.attention_config.backend is AttentionBackendEnum[expected]


def test_the_start_on_blackwell_says_what_stands_in_for_flashinfer(
    on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_card(monkeypatch, 10, 0, 4)
    # For heads of 256 version 4 is taken only by who can do with its large pages: vLLM's layers do.
    version = lambda supports_fa4_hd256=False, **_: 4 if supports_fa4_hd256 else 2  # noqa: E731
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", version)
    first = SimpleNamespace(backend=AttentionBackendEnum.FLASHINFER)
    valid = staticmethod(lambda *_: ([first], {}))
    monkeypatch.setattr(CudaPlatform, "get_valid_backends", valid, raising=False)
    said: list[str] = []
    monkeypatch.setattr(backends.logger, "info", lambda text, *args: said.append(text % args))
    engine_args = EngineArgs(str(tiny_model()), additional_config={"kv_eviction": {}})
    arguments.after_engine_config(engine_args, on_cuda)
    ends = "attention backend TRITON_ATTN, where vLLM would take FLASHINFER"
    assert any(line.endswith(ends) for line in said)


def test_a_model_that_no_backend_takes_is_refused_with_their_reasons(
    on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_card(monkeypatch, 7, 5, 2)
    monkeypatch.setattr(flash_attn.FlashAttentionBackend, "supports_dtype", lambda _: False)
    triton = AttentionBackendEnum.TRITON_ATTN.get_class()
    monkeypatch.setattr(triton, "supports_dtype", lambda _: False)
    with pytest.raises(ConfigError, match=r"FLASH_ATTN \(.*\), TRITON_ATTN \(.*\); serve it"):
        refuse_unsupported(on_cuda, EVICTION)


class Drafter(SimpleNamespace):
    """What our checks ask of vLLM's configuration of a drafter."""

    parallel_drafting = enable_adaptive_verification = has_modules = False
    num_speculative_tokens = 2
    draft_model_config = SimpleNamespace(get_total_num_hidden_layers=lambda: 1)

    def uses_draft_kv_cache(self) -> bool:
        return self.method != "ngram"

    def use_multi_module_mtp(self) -> bool:
        return self.has_modules


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_rounds_beside_drafts_that_the_host_counts_too_early_are_refused(
    method: str, is_v2: bool, on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda.speculative_config = Drafter(method=method)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_v2)
    on_cuda.scheduler_config.async_scheduling = True
    refuse_unsupported(on_cuda, EVICTION)
    with pytest.raises(ConfigError, match=r"decode_budget .*--no-async-scheduling"):
        refuse_unsupported(on_cuda, EvictionConfig(method="adakv-perturb", decode_budget=512))
    on_cuda.scheduler_config.async_scheduling = False
    refuse_unsupported(on_cuda, EvictionConfig(method="adakv-perturb", decode_budget=512))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "dflash"}, r"by 'dflash' is not supported here; choose 'ngram' or 'draft_mod"),
        ({"parallel_drafting": True}, r"several tokens at once"),
        ({"has_modules": True}, r"drafters with several MTP modules, .* are not supported; leave"),
        ({"enable_adaptive_verification": True}, r"drafters with enable_adaptive_verification are"),
    ],
)
def test_drafters_that_the_host_cannot_follow_are_refused(
    change: dict[str, Any], message: str, on_cuda: VllmConfig
) -> None:
    on_cuda.speculative_config = Drafter(**{"method": "mtp", **change})
    with pytest.raises(ConfigError, match=message):
        refuse_unsupported(on_cuda, EVICTION)


def test_the_start_says_what_no_card_has_run(
    on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    assert report.not_run_on_a_card(on_cuda) == []
    on_cuda.speculative_config = Drafter(method="eagle")
    on_cuda.parallel_config.data_parallel_size = 2
    on_cuda.parallel_config.pipeline_parallel_size = 2
    on_cuda.parallel_config.enable_expert_parallel = True
    names = report.not_run_on_a_card(on_cuda)
    assert {"drafters with layers", "data parallelism", "pipeline parallelism"} < {*names}
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()
    for name in names:
        assert name in page


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            *("attention_config.backend", AttentionBackendEnum.FLASHINFER),
            r"attention backend FLASHINFER has no view.*choose FLASH_ATTN or TRITON_ATTN",
        ),
        ("parallel_config.enable_dbo", True, r"microbatches \(--enable-dbo\) is not .*; switch it"),
        ("parallel_config.enable_elastic_ep", True, "elastic expert parallelism .* is not suppo"),
        ("cache_config.cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2 is not supported"),
        ("cache_config.block_size", 24, "block_size = 24 is not accepted; use a multiple of 16"),
        ("parallel_config.worker_cls", "x.Y", r"worker_cls = 'x\.Y' replaces the worker"),
    ],
)
def test_settings_that_are_refused_on_cuda(
    path: str, value: Any, message: str, on_cuda: VllmConfig
) -> None:
    refuse_unsupported(on_cuda, EVICTION)
    set_to(on_cuda, path, value)
    with pytest.raises(ConfigError, match=message):
        refuse_unsupported(on_cuda, EVICTION)


def test_rounds_are_made_on_cuda(on_cuda: VllmConfig) -> None:
    refuse_unsupported(on_cuda, EvictionConfig(method="adakv-perturb", decode_budget=512))


def test_other_platforms_are_refused(on_cuda: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "is_cuda", lambda: False)
    monkeypatch.setattr(CudaPlatform, "device_name", "rocm")
    with pytest.raises(ConfigError, match=r"platform 'rocm' has no backend yet; accepted: 'cpu'"):
        refuse_unsupported(on_cuda, EVICTION)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"block_size = 48.*; budget = 40"):
        create({"budget": 40}, block_size=48)
