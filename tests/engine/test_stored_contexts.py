"""Contexts in a folder, on real engines: compressed once, read after restarts, right or a miss."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Answer, Engine, EngineFactory, _engine
from tests.engine.random_models import random_prompts
from vllm_kvselect.engine.platforms import has_fp8_caches
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager
from vllm_kvselect.engine.states.loads import ContextLoads
from vllm_kvselect.store.folder import Folder

CONTEXT, NUM_BLOCKS = 700, 120
BORDER = CONTEXT // 32
EVICTION = {
    "method": "layer-keydiff",
    "budget": 0.25,
    "context": CONTEXT,
    "allow_override": ["method", "context"],
    "check_integrity": True,
}
METHODS = ("layer-keydiff", "adakv-perturb", "thetakv")
"""Even and uneven heads, and layers that share pages."""


def with_store(folder: Path, **values: Any) -> dict[str, Any]:
    return {**EVICTION, "context_store": str(folder), **values}


@pytest.fixture(scope="module")
def prompts(text_tokens: list[int]) -> list[list[int]]:
    """Two questions over one context."""
    context = text_tokens[:CONTEXT]
    return [[*context, 1000 + i, *text_tokens[2000 + 90 * i : 2040 + 97 * i]] for i in range(2)]


def loads_of(engine: Engine) -> ContextLoads:
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert isinstance(manager, HeadwiseManager)
    assert manager.loads is not None
    return manager.loads


def files(folder: Path, number: int) -> list[Path]:
    """Waits for the writer, and gives the files."""
    deadline = threading.Event()
    for _ in range(200):
        if len(Folder(folder).entries()) >= number:
            break
        deadline.wait(0.05)
    return [entry.path for entry in Folder(folder).entries()]


def settings(method: str) -> list[dict[str, Any]]:
    return [{"kv_eviction": method}]


@contextmanager
def listening() -> Iterator[list[str]]:
    """What our logger says. An engine that starts takes handlers away."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("vllm.kvselect")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def ask(engine: Engine, prompts: list[list[int]], method: str) -> list[Answer]:
    return [engine.generate([prompt], 16, settings(method))[0] for prompt in prompts]


def test_a_server_that_starts_finds_what_one_before_it_compressed(
    start_engine: EngineFactory, prompts: list[list[int]], tmp_path: Path
) -> None:
    stats: dict[str, Any] = {"disable_log_stats": False}
    with start_engine(with_store(tmp_path), NUM_BLOCKS, **stats) as engine:
        first = {method: ask(engine, prompts, method) for method in METHODS}
        assert engine.worker.kv_eviction_stats()["num_evicted"] == len(METHODS)
        stored = files(tmp_path, len(METHODS))
        assert len(stored) == len(METHODS)
    with start_engine(with_store(tmp_path), NUM_BLOCKS, **stats) as engine, listening() as said:
        hits = engine.record_hits()
        again = {method: ask(engine, prompts, method) for method in METHODS}
        # No token of the context is computed, and nothing is compressed or written again.
        assert hits == [32 * BORDER, 32 * BORDER] * len(METHODS)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 0
        for method in METHODS:
            assert [a.token_ids for a in again[method]] == [a.token_ids for a in first[method]]
            assert again[method] == first[method]
        counts = {m.name: m.value for m in engine.llm.get_metrics() if "_contexts" in m.name}
        assert counts["vllm:kv_eviction_loaded_contexts"] == len(METHODS)
        assert counts["vllm:kv_eviction_stored_contexts"] == 0
        assert not said
        _other_salts_and_settings_find_nothing(engine, prompts)
        _damaged_files_are_misses(engine, prompts, tmp_path, first, said)
        _who_leaves_while_a_file_is_read_leaves_no_block(engine, prompts)
        assert engine.blocks_in_use() == 0


def _other_salts_and_settings_find_nothing(engine: Engine, prompts: list[list[int]]) -> None:
    assert engine.scheduler.reset_prefix_cache()
    hits = engine.record_hits()
    other = {"kv_eviction": METHODS[0], "kv_eviction_context": CONTEXT - 64}
    engine.generate(prompts[:1], 2, [other])
    salted = {"prompt_token_ids": prompts[0], "cache_salt": "tenant"}
    assert engine.scheduler.reset_prefix_cache()
    engine.llm.generate([salted], engine.sampling(2, settings(METHODS[0])[0]), use_tqdm=False)
    assert hits[-1] == 0
    assert hits[0] < 32 * BORDER


def _damaged_files_are_misses(
    engine: Engine,
    prompts: list[list[int]],
    folder: Path,
    first: dict[str, list[Answer]],
    said: list[str],
) -> None:
    stored = files(folder, 5)
    assert len(stored) == 5  # those of the other context and of the other salt, too
    for path in stored:
        content = bytearray(path.read_bytes())
        content[-1000] ^= 4
        path.write_bytes(content)
    assert engine.scheduler.reset_prefix_cache()
    hits = engine.record_hits()
    assert ask(engine, prompts, METHODS[0]) == first[METHODS[0]]
    assert hits == [0, 32 * BORDER]
    assert len(said) == 1
    assert "checksum is wrong" in said[0]
    # It was written anew, and what was written is taken.
    for _ in range(200):
        if Folder(folder).problem(Folder(folder).entries()[-1].place) is None:
            break
        threading.Event().wait(0.05)
    assert engine.scheduler.reset_prefix_cache()
    assert ask(engine, prompts, METHODS[0]) == first[METHODS[0]]
    assert hits[2:] == [32 * BORDER, 32 * BORDER]


def _who_leaves_while_a_file_is_read_leaves_no_block(
    engine: Engine, prompts: list[list[int]]
) -> None:
    assert engine.scheduler.reset_prefix_cache()
    go, transfers = threading.Event(), engine.worker._contexts._transfers
    read = transfers._read

    def read_late(load: Any) -> Any:
        go.wait(30)
        return read(load)

    transfers._read = read_late
    llm = engine.llm.llm_engine
    llm.add_request(
        "late", {"prompt_token_ids": prompts[0]}, engine.sampling(4, settings(METHODS[0])[0])
    )
    for _ in range(3):
        llm.step()
    assert loads_of(engine).held
    assert engine.blocks_in_use() > 0
    llm.abort_request([next(iter(engine.scheduler.requests))], internal=True)
    assert not loads_of(engine).held
    assert engine.blocks_in_use() == 0
    go.set()
    transfers._read = read
    hits = engine.record_hits()
    engine.generate(prompts[:1], 4, settings(METHODS[0]))
    assert hits == [32 * BORDER]


@pytest.mark.xdist_group("ranks")  # which has a process that starts others quickly
def test_two_ranks_read_a_context_together_or_not_at_all(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder, [prompt] = tmp_path / "contexts", random_prompts([300])
    eviction = with_store(folder, method="adakv-perturb", context=256)
    given = {"skip_tokenizer_init": True, "max_model_len": 512, "tensor_parallel_size": 2}
    given["kv_cache_dtype"] = "fp8" if has_fp8_caches() else "auto"
    with _engine(eviction, 60, model=llama, **given) as engine:
        first = engine.generate([prompt], 12)
        assert len(files(folder, 2)) == 2
        assert engine.scheduler.reset_prefix_cache()
        hits = engine.record_hits()
        again = engine.generate([prompt], 12)
        assert hits == [256]
        assert again == first
        # What the other rank cannot read, this one does not use.
        [other] = [path for path in files(folder, 2) if ".1of2." in path.name]
        other.write_bytes(other.read_bytes()[:-1])
        assert engine.scheduler.reset_prefix_cache()
        assert engine.generate([prompt], 12) == first
        assert hits[1:] == [0]
