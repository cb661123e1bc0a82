"""The analyses, one file each: a study in, findings out."""

from collections.abc import Callable

from vllm_kvselect.papers.alpha import measure_alpha
from vllm_kvselect.papers.assumption import measure_assumption
from vllm_kvselect.papers.bound import measure_bound
from vllm_kvselect.papers.metric import measure_metric
from vllm_kvselect.papers.norms import measure_norms
from vllm_kvselect.papers.perturbation import measure_perturbation
from vllm_kvselect.papers.report import Findings
from vllm_kvselect.papers.settings import AnalysisName
from vllm_kvselect.papers.sparse_prefill import measure_sparse_prefill
from vllm_kvselect.papers.study import Study

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
