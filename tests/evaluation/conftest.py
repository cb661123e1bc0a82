"""The random model of the offline room's tests, and RULER's tasks."""

import pytest

from tests.offline.conftest import llama, llama_folder, token_ids, tokenizer
from vllm_kvselect.evaluation.suites.ruler_package import Task, ruler_tasks

__all__ = ["llama", "llama_folder", "token_ids", "tokenizer"]


@pytest.fixture(scope="session")
def known() -> dict[str, Task]:
    return ruler_tasks()
