import pytest
from papers.settings import ANALYSIS_NAMES, DEFAULTS, AnalysisConfig
from pydantic import ValidationError


@pytest.mark.parametrize("analysis", ANALYSIS_NAMES)
def test_every_analysis_has_methods_and_budgets_of_its_own(analysis: str) -> None:
    config = AnalysisConfig.parse({"analysis": analysis})
    assert (config.methods, config.budgets) == DEFAULTS[config.analysis]
    assert len(config.evictions()) == len(config.methods) * len(config.budgets)


def test_methods_are_compared_with_their_partners_or_the_first() -> None:
    def pairs(*methods: str) -> list[tuple[str, str]]:
        return AnalysisConfig.parse({"analysis": "perturbation", "methods": methods}).pairs()

    assert pairs("snapkv", "snapkv-perturb", "adakv", "adakv-perturb") == [
        ("snapkv-perturb", "snapkv"),
        ("adakv-perturb", "adakv"),
    ]
    assert pairs("adakv-perturb", "streaming-llm") == [("streaming-llm", "adakv-perturb")]
    assert pairs("snapkv", "adakv", "adakv-perturb") == [("adakv-perturb", "adakv")]
    assert pairs("snapkv") == []


def test_configuration_is_frozen_and_knows_its_keys() -> None:
    config = AnalysisConfig(analysis="bound")
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        AnalysisConfig.model_validate({"analysis": "bound", "speed": 1})


def test_pictures_show_a_fifth_where_it_is_measured() -> None:
    def headline(*budgets: float) -> int | float:
        return AnalysisConfig.parse({"analysis": "bound", "budgets": budgets}).headline_budget

    assert headline(0.4, 0.2) == 0.2
    assert headline(0.1, 0.3, 0.5) == 0.3
