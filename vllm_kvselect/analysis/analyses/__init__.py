"""The analyses, one file each: a study in, findings out."""

from collections.abc import Callable

from vllm_kvselect.analysis.analyses.ablation import measure_ablation
from vllm_kvselect.analysis.analyses.alpha import measure_alpha
from vllm_kvselect.analysis.analyses.assumption import measure_assumption
from vllm_kvselect.analysis.analyses.bound import measure_bound
from vllm_kvselect.analysis.analyses.budget import measure_budget
from vllm_kvselect.analysis.analyses.metric import measure_metric
from vllm_kvselect.analysis.analyses.perturbation import measure_perturbation
from vllm_kvselect.analysis.report import Findings
from vllm_kvselect.analysis.settings import AnalysisName
from vllm_kvselect.analysis.study import Study

ANALYSES: dict[AnalysisName, Callable[[Study], Findings]] = {
    "perturbation": measure_perturbation,
    "assumption": measure_assumption,
    "bound": measure_bound,
    "alpha": measure_alpha,
    "metric": measure_metric,
    "budget": measure_budget,
    "ablation": measure_ablation,
}
"""Analyses by name."""
