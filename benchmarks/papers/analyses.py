"""The analyses, one file each: a study in, findings out."""

from collections.abc import Callable

from papers.alpha import measure_alpha
from papers.assumption import measure_assumption
from papers.bound import measure_bound
from papers.metric import measure_metric
from papers.norms import measure_norms
from papers.perturbation import measure_perturbation
from papers.report import Findings
from papers.settings import AnalysisName
from papers.sparse_prefill import measure_sparse_prefill
from papers.study import Study

ANALYSES: dict[AnalysisName, Callable[[Study], Findings]] = {
    "perturbation": measure_perturbation,
    "assumption": measure_assumption,
    "bound": measure_bound,
    "alpha": measure_alpha,
    "metric": measure_metric,
    "norms": measure_norms,
    "sparse-prefill": measure_sparse_prefill,
}
"""Analyses by name."""
