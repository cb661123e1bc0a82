"""How much of the budget stage 1 should fill: one alpha for all heads, or the best for each."""

from collections import defaultdict

import torch
from matplotlib.figure import Figure

from papers.figures import Axes, Curves, Scale, curves, heat_maps
from papers.report import Findings
from papers.settings import AnalysisConfig
from papers.statistics import rounded
from papers.study import Setting, Study
from vllm_kvselect.offline.retained import retained_entries

ALPHAS = tuple(step / 10 for step in range(11))
"""The last is one stage: everything is retained by score."""

Grid = dict[Setting, torch.Tensor]
"""Distances by alpha, `[num_texts, len(ALPHAS), num_layers, num_kv_heads]`."""


def measure_alpha(study: Study) -> Findings:
    """Measures the perturbation for alpha from 0 to 1.

    Per head, the best alpha is chosen on one half of the texts and judged on the other, or on the
    same text where there is only one. A head is a KV head, its distance the sum over its group.

    Args:
        study: Model, texts and settings.

    Returns:
        Perturbation by alpha, relative to one stage, and each head's best alpha.
    """
    config, grid = study.config, _measure(study)
    rows, settings = [], []
    for setting, distances in grid.items():
        relative, best, judged = _relative(distances), _best(distances), _judged(distances)
        lowest = int(relative.argmin())
        rows.append(
            (
                setting.scenario,
                setting.method,
                str(setting.budget),
                f"{relative[0]:.3f}",
                f"{relative[5]:.3f}",
                f"{ALPHAS[lowest]:.1f}: {relative[lowest]:.3f}",
                f"{judged:.3f}",
            )
        )
        settings.append(
            {
                **setting._asdict(),
                "alphas": ALPHAS,
                "relative": rounded(relative),
                "best_alpha_of_head": [[ALPHAS[each] for each in row] for row in best.tolist()],
                "best_alpha_of_head_judged_on_other_texts": judged,
            }
        )
    columns = ("scenario", "method", "budget", "alpha 0", "alpha 0.5", "best alpha")
    return Findings(
        columns=(*columns, "best of each head"),
        rows=rows,
        results={"settings": settings},
        figures={"alphas": _alphas_figure(config, grid), "heads": _heads_figure(config, grid)},
        notes=[
            "Sum of all heads' distances over that of alpha 1 (one stage). *best of each head*: "
            "chosen on every other text, judged on the rest."
        ],
    )


def _measure(study: Study) -> Grid:
    found: dict[Setting, list[torch.Tensor]] = defaultdict(list)
    evictions = [
        each.model_copy(update={"alpha": alpha})
        for each in study.config.evictions()
        for alpha in ALPHAS
    ]
    for setting, eviction, sample in study.walk(evictions):
        distances = sample.head_distances(retained_entries(sample.prompt, eviction))
        found[setting].append(distances.unflatten(-1, (study.num_kv_heads, -1)).sum(-1))
    return {
        setting: torch.stack(values).unflatten(0, (-1, len(ALPHAS)))
        for setting, values in found.items()
    }


def _relative(distances: torch.Tensor) -> torch.Tensor:
    """Sum over texts and heads, over that of one stage: `[len(ALPHAS)]`."""
    total = distances.sum(dim=(0, 2, 3))
    return total / total[-1]


def _best(distances: torch.Tensor) -> torch.Tensor:
    """Index of the best alpha of every head, `[num_layers, num_kv_heads]`."""
    return distances.mean(0).argmin(dim=0)


def _judged(distances: torch.Tensor) -> float:
    """Sum of distances with each head's best alpha, on texts that did not choose it."""
    choosing = distances[0::2]
    judging = distances[1::2] if len(distances) > 1 else distances
    chosen = judging.gather(1, _best(choosing).expand(len(judging), 1, -1, -1))
    return (chosen.sum() / judging[:, -1].sum()).item()


def _alphas_figure(config: AnalysisConfig, grid: Grid) -> Figure:
    panels: dict[str, Curves] = {
        scenario: {
            f"{method}, {budget}": (
                ALPHAS,
                rounded(_relative(grid[Setting(scenario, method, budget)])),
            )
            for method in config.methods
            for budget in config.budgets
        }
        for scenario in config.scenarios
    }
    return curves(panels, Axes("alpha", "sum of distances, relative to one stage", level=1))


def _heads_figure(config: AnalysisConfig, grid: Grid) -> Figure:
    panels = {}
    for scenario in config.scenarios:
        for method in config.methods:
            best = _best(grid[Setting(scenario, method, config.headline_budget)])
            panels[f"{method}\n{scenario}"] = rounded(torch.tensor(ALPHAS)[best])
    label = f"best alpha (budget {config.headline_budget})"
    return heat_maps(panels, Scale(label, 0, 1))
