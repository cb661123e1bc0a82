"""`--max-model-len auto`: vLLM fits the longest prompt to the pool, and a start speaks of that."""

import logging
from typing import Any

import pytest

from tests.engine.configurations import create
from tests.engine.conftest import BLOCK_SIZE, EngineFactory
from vllm_kvselect.config import ConfigError


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What the plugin logs; vLLM sets up its loggers with the first configuration of a process."""
    create({"method": "none"})
    logger = logging.getLogger("vllm.kvselect")
    logger.addHandler(caplog.handler)
    yield lambda: list(dict.fromkeys(each.getMessage() for each in caplog.records))
    logger.removeHandler(caplog.handler)


def test_a_start_speaks_of_the_length_that_is_served(start: EngineFactory, lines: Any) -> None:
    with start({"method": "snapkv", "budget": 0.25}, 32, max_model_len=-1) as engine:
        length = engine.llm.llm_engine.model_config.max_model_len
    assert length < 4096
    (line,) = [line for line in lines() if "retains" in line]
    assert f"retains {length // 4} entries" in line
    assert f" of a prompt of {length} tokens; frees " in line
    assert f" of its {-(-length // BLOCK_SIZE)} blocks" in line


def test_a_budget_that_is_too_small_for_the_length_that_is_served_is_refused(
    start: EngineFactory,
) -> None:
    reason, small = r"auto leaves too short prompts here: budget = 0\.03", {"budget": 0.03}
    with pytest.raises(ConfigError, match=reason), start(small, 32, max_model_len=-1):
        pass
