"""`--max-model-len auto`: vLLM fits the longest prompt to the pool, and a start speaks of that."""

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.engine.random_models import random_llama
from tests.engine.test_unreadable_projections import engine_in_this_process  # noqa: F401 (fixture)
from vllm_kvselect.config import ConfigError

NUM_BLOCKS, BLOCK_SIZE = 32, 32
BLOCK_BYTES = BLOCK_SIZE * 4 * 4 * 2 * 32 * 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What the plugin logs."""
    logger = logging.getLogger("vllm.kvselect")
    logger.addHandler(caplog.handler)
    yield lambda: list(dict.fromkeys(each.getMessage() for each in caplog.records))
    logger.removeHandler(caplog.handler)


def start(folder: Path, **eviction: Any) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=-1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
        additional_config={"kv_eviction": {"method": "snapkv", **eviction}},
    )


def test_a_start_speaks_of_the_length_that_is_served(llama: Path, lines: Any) -> None:
    llm = start(llama, budget=0.25)
    try:
        length = llm.llm_engine.model_config.max_model_len
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert length < 4096
    (line,) = [line for line in lines() if "retains" in line]
    assert f"retains {length // 4} entries" in line
    assert f" of a prompt of {length} tokens; frees " in line
    assert f" of its {-(-length // BLOCK_SIZE)} blocks" in line


def test_a_budget_that_is_too_small_for_the_length_that_is_served_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"auto leaves too short prompts here: budget = 0\.03"):
        start(llama, budget=0.03)
