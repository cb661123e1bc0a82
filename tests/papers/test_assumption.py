import pytest
from papers.assumption import stage_1_entries

from tests.offline.test_retained import NUM_PROMPT_TOKENS, WINDOW, make_config, make_prompt
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.retained import retained_entries, tail_entries


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_stage_1_is_its_share_of_what_is_retained(alpha: float) -> None:
    config = make_config("snapkv-perturb", alpha=alpha)
    stage_1 = stage_1_entries(make_prompt(), config)
    tail = tail_entries(make_prompt(), config)
    retained = retained_entries(make_prompt(), config)
    assert tail.sum(-1).unique().tolist() == [WINDOW]
    assert stage_1.sum(-1).unique().tolist() == [int(alpha * (24 - WINDOW))]
    assert not (stage_1 & tail).any()
    assert ((stage_1 | tail) <= retained).all()


def test_stage_1_of_a_method_without_one_is_refused() -> None:
    with pytest.raises(EvaluationError, match="defensivekv does not select in two stages"):
        stage_1_entries(make_prompt(), make_config("defensivekv"))


def test_a_budget_above_the_prompt_needs_no_stage_1() -> None:
    config = make_config("adakv-perturb", budget=NUM_PROMPT_TOKENS)
    assert not stage_1_entries(make_prompt(), config).any()
