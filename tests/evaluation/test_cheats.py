"""What an evaluation must notice, on the small model: scorers that choose badly, and no choice."""

import pytest

from vllm_kvselect.evaluation import off_engine
from vllm_kvselect.evaluation.scores import Row, rows, scored
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig
from vllm_kvselect.evaluation.suites.needles import needles
from vllm_kvselect.offline.models import load_tokenizer

pytestmark = pytest.mark.xdist_group("cheats")  # one process answers for all

CONFIG = EvaluationConfig.parse(
    {
        "suite": "needles",
        "lengths": (384,),
        "num_examples": 6,
        "methods": ("random", "snapkv"),
        "budgets": (1.0, 0.25),
        "dtype": "float32",
        "scenarios": ("regular", "context-only"),
    }
)


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, object], Row]:
    examples = needles(CONFIG, load_tokenizer(""))
    predictions = [each for some in off_engine.answer(CONFIG, examples, set()) for each in some]
    return {
        (row.scenario, row.method, row.budget): row for row in rows(scored(examples, predictions))
    }


@pytest.mark.parametrize("scenario", CONFIG.scenarios)
def test_entries_drawn_at_random_do_not_keep_the_answer(
    scenario: str, found: dict[tuple[str, str, object], Row]
) -> None:
    full, random = found[scenario, FULL, None], found[scenario, "random", 0.25]
    assert full.score is not None
    assert random.score is not None
    assert full.score.value >= 5 / 6
    assert random.score.value <= 2 / 6
    assert random.retained < 0.4
    assert random.nll is not None
    assert random.nll.interval is not None
    assert random.nll.interval[0] > 0.5, "nats per token above the full cache"


@pytest.mark.parametrize("scenario", CONFIG.scenarios)
@pytest.mark.parametrize("method", ["random", "snapkv"])
def test_keeping_everything_is_the_full_cache_whatever_the_scorer(
    method: str, scenario: str, found: dict[tuple[str, str, object], Row]
) -> None:
    full, everything = found[scenario, FULL, None], found[scenario, method, 1.0]
    assert everything.retained == 1.0
    assert everything.scores == full.scores
    assert everything.nll is not None
    assert everything.nll.difference == pytest.approx(0.0, abs=1e-5)
