"""Whether the finding depends on the distance: L1 as published, L2, or the cosine."""

from collections import defaultdict

import torch
from matplotlib.figure import Figure

from papers.figures import Scale, heat_maps
from papers.quantities import METRICS, Metric
from papers.report import Findings
from papers.settings import AnalysisConfig
from papers.statistics import (
    interval_text,
    rounded,
    share_interval,
    share_lower,
)
from papers.study import Setting, Study
from vllm_kvselect.offline.retained import retained_entries

Distances = dict[tuple[Setting, Metric], torch.Tensor]
"""`[num_texts, num_layers, num_heads]`."""


def measure_metric(study: Study) -> Findings:
    """Measures the same choice of entries with three distances.

    Args:
        study: Model, texts and settings.

    Returns:
        Shares of heads that improve, by distance.
    """
    config, distances = study.config, _measure(study)
    rows, shares = [], []
    for scenario in config.scenarios:
        for method, against in config.pairs():
            for budget in config.budgets:
                setting = Setting(scenario, method, budget)
                for metric in METRICS:
                    two = distances[setting, metric]
                    one = distances[setting._replace(method=against), metric]
                    lower, interval = share_lower(one, two), share_interval(one, two)
                    ratio = (two.sum() / one.sum()).item()
                    shares.append(
                        {
                            **setting._asdict(),
                            "against": against,
                            "metric": metric,
                            "heads_lower": lower,
                            "interval": interval,
                            "ratio": ratio,
                        }
                    )
                    cells = (scenario, method, against, str(budget), metric)
                    shown = (f"{lower:.1%}", interval_text(interval), f"{ratio:.3f}")
                    rows.append((*cells, *shown))
    columns = ("scenario", "method", "against", "budget", "distance", "heads lower", "95 %")
    return Findings(
        columns=(*columns, "sum"),
        rows=rows,
        results={"shares": shares},
        figures={"heads": _heads_figure(config, distances)} if shares else {},
        notes=[
            "The entries are chosen as published, by L1 norms; only the distance differs. *sum*: "
            "of all distances, the method's over the other's."
        ],
    )


def _measure(study: Study) -> Distances:
    found: dict[tuple[Setting, Metric], list[torch.Tensor]] = defaultdict(list)
    for setting, eviction, sample in study.walk():
        retained = retained_entries(sample.prompt, eviction)
        for metric in METRICS:
            found[setting, metric].append(sample.head_distances(retained, metric))
    return {key: torch.stack(values) for key, values in found.items()}


def _heads_figure(config: AnalysisConfig, distances: Distances) -> Figure:
    """The first pair by every distance, at the headline budget."""
    method, against = config.pairs()[0]
    panels = {}
    for scenario in config.scenarios:
        for metric in METRICS:
            setting = Setting(scenario, method, config.headline_budget)
            two = distances[setting, metric]
            one = distances[setting._replace(method=against), metric]
            panels[f"{metric}\n{scenario}"] = rounded(100 * (1 - two.mean(0) / one.mean(0)))
    label = f"{method}: distance lower by, % (budget {config.headline_budget})"
    return heat_maps(panels, Scale(label, -50, 50, "RdBu"))
