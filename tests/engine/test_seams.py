"""What docs/seams.md says that we rely on is there, and what we override is called as we expect."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_kvselect.engine

PAGE = Path(__file__).parents[2] / "docs" / "seams.md"
PACKAGE = Path(vllm_kvselect.engine.__file__).parent
V1, V2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu"
COORDINATORS = "vllm.v1.core.kv_cache_coordinator"
TRITON = "vllm.v1.attention.backends.triton_attn"
FLASH = "vllm.v1.attention.backends.flash_attn"
REGISTRY = "vllm.v1.attention.backends.registry"
BEAMS = "vllm.entrypoints.generate.beam_search"
MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"

WHERE = {
    "AggregateStatLoggerBase": "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
    "AsyncLLM": "vllm.v1.engine.async_llm:AsyncLLM",
    "AsyncOutput": f"{V2}.async_utils:AsyncOutput",
    "Attention": "vllm.model_executor.layers.attention:Attention",
    "AttentionBackend": "vllm.v1.attention.backend:AttentionBackend",
    "AttentionBackendEnum": f"{REGISTRY}:AttentionBackendEnum",
    "AttentionImpl": "vllm.v1.attention.backend:AttentionImpl",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend:AttentionMetadataBuilder",
    "BaseServing": "vllm.entrypoints.serve.engine.serving:BaseServing",
    "BeamSearchOfflineMixin": f"{BEAMS}.offline:BeamSearchOfflineMixin",
    "BeamSearchOnlineMixin": f"{BEAMS}.online:BeamSearchOnlineMixin",
    "BlockPool": "vllm.v1.core.block_pool:BlockPool",
    "CacheConfig": "vllm.config:CacheConfig",
    "CachedRequestData": "vllm.v1.core.sched.output:CachedRequestData",
    "CommonAttentionMetadata": "vllm.v1.attention.backend:CommonAttentionMetadata",
    "CompilationConfig": "vllm.config:CompilationConfig",
    "CudaGraphManager": f"{V2}.cudagraph_utils:CudaGraphManager",
    "CudagraphDispatcher": "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
    "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    "FlashAttentionImpl": f"{FLASH}:FlashAttentionImpl",
    "FlashAttentionMetadataBuilder": f"{FLASH}:FlashAttentionMetadataBuilder",
    "GPUModelRunner": V1,
    "GPUModelRunner.attn_groups[..]": "vllm.v1.worker.utils:AttentionGroup",
    "GPUModelRunner.drafter": "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
    "GPUModelRunner.input_batch": "vllm.v1.worker.gpu_input_batch:InputBatch",
    "GPUModelRunner.speculator": f"{V2}.spec_decode.speculator:DraftModelSpeculator",
    "GroupCoordinator": "vllm.distributed.parallel_state:GroupCoordinator",
    "KVCacheBlock": "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    "KVCacheManager": "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "KVCacheSpecRegistry": "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry",
    "LBHNC": "vllm.v1.kv_cache_interface:KVCacheLayout.LBHNC",
    "LLMEngine": "vllm.v1.engine.llm_engine:LLMEngine",
    "LinearBase": "vllm.model_executor.layers.linear:LinearBase",
    "LinearBase.quant_method": (
        "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase"
    ),
    "ModelRunnerOutput": "vllm.v1.outputs:ModelRunnerOutput",
    "ParallelConfig": "vllm.config:ParallelConfig",
    "BlockTables": f"{V2}.block_table:BlockTables",
    "StagedWriteTensor": f"{V2}.buffer_utils:StagedWriteTensor",
    "SamplingParams": "vllm:SamplingParams",
    "Request": "vllm.v1.request:Request",
    "Scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "SchedulerConfig": "vllm.config:SchedulerConfig",
    "SchedulerOutput": "vllm.v1.core.sched.output:SchedulerOutput",
    "SchedulerStats": "vllm.v1.metrics.stats:SchedulerStats",
    "SingleTypeKVCacheManager": MANAGER,
    "StatLoggerManager": "vllm.v1.metrics.loggers:StatLoggerManager",
    "TritonAttentionImpl": f"{TRITON}:TritonAttentionImpl",
    "VllmConfig": "vllm.config:VllmConfig",
    "Worker": "vllm.v1.worker.gpu_worker:Worker",
    "allocate_kv_cache": "vllm.v1.worker.utils:allocate_kv_cache",
    "canonicalize_singleton_dim_strides": (
        "vllm.utils.torch_utils:canonicalize_singleton_dim_strides"
    ),
    "find_longest_cache_hit": f"{COORDINATORS}:UnitaryKVCacheCoordinator.find_longest_cache_hit",
    "flash_attn_varlen_func": "tests.engine.flash_attention:INTERFACE.flash_attn_varlen_func",
    "input_batch": "vllm.v1.worker.gpu_input_batch:InputBatch",
    "ops": "vllm._custom_ops",
    "register_backend": f"{REGISTRY}:register_backend",
    "replace_as": "vllm.v1.kv_cache_interface:replace_as",
    "selector": "vllm.v1.attention.selector",
    "seq_threshold_3D": f"{TRITON}:TritonAttentionMetadataBuilder.seq_threshold_3D",
    "sinks": f"{FLASH}:FlashAttentionImpl.sinks",
    "sort_batch_req_ids": f"{V2}.model_runner:sort_batch_req_ids",
    "softmax_segm_*": f"{TRITON}:TritonAttentionMetadataBuilder.softmax_segm_output",
    "unified_attention": "vllm.v1.attention.ops.triton_unified_attention:unified_attention",
    "vllm.general_plugins": "vllm.plugins:DEFAULT_PLUGINS_GROUP",
}
"""Where the page's names are; those that begin with none of them go on from the name before."""

NO_NAMES = {"_float", "max_tokens=1", "vllm_xargs"}
"""What else the first columns quote."""


def named() -> list[list[str]]:
    """What the first column of each row of the tables of names quotes."""
    text = PAGE.read_text(encoding="utf-8")
    tables = re.findall(r"^\| vLLM's name \|.*\n\|[- |]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    return [[name for name in re.findall("`([^`]+)`", row) if name not in NO_NAMES] for row in rows]


def resolve(place: str) -> Any:
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        assert has(found, name), f"{place}: nothing is called {name}"
        found = getattr(found, name, None)
    return found


def has(owner: Any, name: str) -> bool:
    """Whether something has an attribute, or its instances are given it where it is defined."""
    if hasattr(owner, name):
        return True
    if not isinstance(owner, type):
        return False
    given = rf'\b(self|layer)\.{name}\b[^(=]*=[^=]|register_buffer\(\s*"{name}"'
    return any(
        name in vars(each).get("__annotations__", {})
        or re.search(given, inspect.getsource(importlib.import_module(each.__module__)))
        for each in owner.__mro__
        if each.__module__.startswith("vllm.")
    )


@pytest.mark.parametrize("names", named(), ids=lambda names: names[0] if names else "none")
def test_every_name_of_the_page_is_there(names: list[str]) -> None:
    owner: Any = None  # of an attribute that only instances have nothing more is known
    is_known = False
    for name in names:
        path = name.removeprefix(".").split(".")
        known = [end for end in range(len(path), 0, -1) if ".".join(path[:end]) in WHERE]
        if known:
            owner, path = resolve(WHERE[".".join(path[: known[0]])]), path[known[0] :]
        is_known = is_known or bool(known)
        assert is_known, f"nothing says where {name} is"
        found = owner
        for part in path:
            assert has(found, part), f"{name}: {found} has no {part}"
            found = getattr(found, part, None)


def modules() -> Iterator[str]:
    """Every module of the engine."""
    prefix = vllm_kvselect.engine.__name__ + "."
    return (found.name for found in pkgutil.walk_packages([str(PACKAGE)], prefix))


def test_everything_that_is_imported_from_vllm_is_there() -> None:
    """Also what is imported only when it is needed."""
    wanted = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                wanted |= {(str(node.module), alias.name) for alias in node.names}
    assert len(wanted) > 80
    for module, name in sorted(wanted):
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def overrides() -> Iterator[tuple[type, str, Callable[..., Any], Callable[..., Any]]]:
    """Our methods that stand in front of one of vLLM's: the class, the name, ours, vLLM's."""
    for module in map(importlib.import_module, modules()):
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__:
                continue
            for name in {name for each in kind.__mro__ for name in vars(each)}:
                if name.startswith("__"):
                    continue
                made = [(each, vars(each)[name]) for each in kind.__mro__ if name in vars(each)]
                ours, others = made[0], made[1:]
                theirs = [each for each in others if each[0].__module__.startswith("vllm.")]
                if ours[0].__module__.startswith("vllm_kvselect.") and theirs:
                    yield kind, name, ours[1], theirs[0][1]


def signature(method: Any) -> inspect.Signature | None:
    """What its callers give; a class method's class comes from Python."""
    function = getattr(method, "__func__", method)
    if not inspect.isfunction(function):
        return None
    found = inspect.signature(function)
    # An underscore says that vLLM itself does not use what comes.
    taken = [each.replace(name=each.name.lstrip("_")) for each in found.parameters.values()]
    return found.replace(parameters=taken[isinstance(method, classmethod) :])


def test_what_we_override_takes_what_vllms_takes() -> None:
    checked = set()
    for kind, name, ours, theirs in overrides():
        mine, stock = signature(ours), signature(theirs)
        if mine is None or stock is None:
            continue
        checked.add(f"{kind.__name__}.{name}")
        takes = {parameter.kind for parameter in mine.parameters.values()}
        for given in stock.parameters.values():
            if given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD):
                continue
            is_taken = given.name in mine.parameters or given.VAR_KEYWORD in takes
            assert is_taken, f"{kind.__name__}.{name} does not take {given.name}"
        for own in mine.parameters.values():
            is_new = own.name not in stock.parameters and own.default is own.empty
            assert not is_new or own.kind in (own.VAR_POSITIONAL, own.VAR_KEYWORD), (
                f"vLLM does not give {kind.__name__}.{name} its {own.name}"
            )
    assert {"HeadwiseManager.cache_blocks", "CutScheduler.make_stats"} <= checked
    assert len(checked) > 40
