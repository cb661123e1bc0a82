"""The actual perturbation over its upper bound theta (Theorem 2 of arXiv 2502.03805)."""

from collections import defaultdict

import torch
from matplotlib.figure import Figure

from papers.figures import Axes, Curves, Scale, curves, heat_maps
from papers.quantities import (
    distance,
    following_attention,
    head_outputs,
    projected_norms,
    retained_attention,
    theta,
)
from papers.report import Findings
from papers.settings import AnalysisConfig
from papers.statistics import rounded, share_lower
from papers.study import Sample, Setting, Study
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.retained import retained_entries

_ROUNDING = 1e-9
"""What float64 may put the perturbation above a bound that it reaches, relative to the bound."""


def measure_bound(study: Study) -> Findings:
    """Measures perturbation and bound per head and budget, in float64.

    Args:
        study: Model, texts and settings.

    Returns:
        Ratios of the perturbation to the bound, and the share of heads whose bound the second
        stage lowers.

    Raises:
        EvaluationError: If the bound does not hold somewhere: then theorem or code is wrong.
    """
    config = study.config
    found: dict[Setting, list[torch.Tensor]] = defaultdict(list)
    for setting, eviction, sample in study.walk():
        found[setting].append(_measure(sample, retained_entries(sample.prompt, eviction)))
    texts = {setting: torch.stack(values) for setting, values in found.items()}
    rows, settings = [], []
    for setting, each in texts.items():
        actual, bound, largest = each.unbind(1)
        ratio = actual.mean(0) / bound.mean(0)
        rows.append(
            (
                setting.scenario,
                setting.method,
                str(setting.budget),
                f"{ratio.mean():.3f}",
                f"{ratio.max():.3f}",
                f"{largest.max():.3f}",
                _share_of_bounds(texts, setting, dict(config.pairs()).get(setting.method)),
            )
        )
        settings.append(
            {
                **setting._asdict(),
                "perturbation": rounded(actual.mean(0)),
                "theta": rounded(bound.mean(0)),
                "largest_ratio": largest.max().item(),
            }
        )
    columns = ("scenario", "method", "budget", "L / theta", "highest head", "highest token")
    return Findings(
        columns=(*columns, "heads with lower theta"),
        rows=rows,
        results={"settings": settings},
        figures={
            "heads": _heads_figure(config, texts),
            "budgets": _budgets_figure(config, texts),
        },
        notes=[
            "The bound held for every head, budget, text and following token; *highest token* is "
            "the closest that one of them came."
        ],
    )


def _measure(sample: Sample, retained: torch.Tensor) -> torch.Tensor:
    """Perturbation and bound, means over tokens, and their highest ratio, by layer and head."""
    rows = []
    for layer, kept in zip(sample.layers, retained, strict=True):
        exact = layer._replace(
            query=layer.query.double(), key=layer.key.double(), value=layer.value.double()
        )
        weights = following_attention(exact, sample.prompt.num_tokens)
        left = retained_attention(weights, kept)
        actual = distance(head_outputs(exact, weights), head_outputs(exact, left))
        bound = theta(weights, left, projected_norms(exact, torch.float64))
        if (actual > bound * (1 + _ROUNDING)).any():
            raise EvaluationError("a perturbation exceeds theta: Theorem 2 does not hold here")
        rows.append(torch.stack((actual.mean(-1), bound.mean(-1), (actual / bound).amax(-1))))
    return torch.stack(rows, dim=1)


def _share_of_bounds(
    texts: dict[Setting, torch.Tensor], setting: Setting, against: str | None
) -> str:
    """Share of heads whose bound is lower than with the method it is compared with."""
    if against is None:
        return ""
    one = setting._replace(method=against)
    return f"{share_lower(texts[one][:, 1], texts[setting][:, 1]):.1%} than {against}"


def _heads_figure(config: AnalysisConfig, texts: dict[Setting, torch.Tensor]) -> Figure:
    panels = {}
    for scenario in config.scenarios:
        for method in config.methods:
            actual, bound, _ = texts[Setting(scenario, method, config.headline_budget)].mean(0)
            panels[f"{method}\n{scenario}"] = rounded(actual / bound)
    label = f"perturbation over theta (budget {config.headline_budget})"
    return heat_maps(panels, Scale(label, 0, 1))


def _budgets_figure(config: AnalysisConfig, texts: dict[Setting, torch.Tensor]) -> Figure:
    panels: dict[str, Curves] = {}
    for scenario in config.scenarios:
        lines = panels.setdefault(scenario, {})
        for method in config.methods:
            means = [texts[Setting(scenario, method, each)].mean(0) for each in config.budgets]
            ratios = [(actual / bound).mean().item() for actual, bound, _ in means]
            lines[method] = (list(config.budgets), ratios)
    return curves(panels, Axes("budget", "perturbation over theta", True))
