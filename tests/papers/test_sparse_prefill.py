"""What segments read, on a random model and real code."""

from pathlib import Path
from typing import Any

import pytest
from papers.settings import AnalysisConfig
from papers.sparse_prefill import RULES, measure_sparse_prefill
from papers.study import Study

from vllm_kvselect.offline.errors import EvaluationError


def rules(folder: Path, **values: Any) -> dict[str, dict[str, float]]:
    given = {"model": str(folder), "texts": "stdlib", "num_texts": 1, "length": 400, **values}
    # Of two layers the first is sparse too: else nothing after a segment could differ.
    given |= {"analysis": "sparse-prefill", "eviction": {"prefill_dense_layers": 0}}
    study = Study(AnalysisConfig.parse(given))
    return {each["rule"]: each for each in measure_sparse_prefill(study).results["rules"]}


def test_who_knows_all_scores_reads_the_most_attention(llama_folder: Path) -> None:
    found = rules(llama_folder)
    assert found.keys() == RULES.keys()
    most = found["most attention (needs all scores)"]
    for name, each in found.items():
        assert each["read"] == 32, name
        assert each["worst_head"] <= each["recall"] <= most["recall"] + 1e-6 <= 1.001, name
        assert each["error"] > 0, name


def test_more_is_lost_by_reading_less(llama_folder: Path) -> None:
    less, more = (rules(llama_folder, budgets=(budget,))["critiprefill"] for budget in (32, 96))
    assert (less["read"], more["read"]) == (32, 96)
    assert less["recall"] < more["recall"]
    assert less["error"] > more["error"]


def test_a_text_without_sparse_segments_is_refused(llama_folder: Path) -> None:
    with pytest.raises(EvaluationError, match="no sparse segment with prefill_budget = 384"):
        rules(llama_folder, budgets=(1.0,), length=400)
