"""Pictures of scores: heat maps of depth by length, and scores over budgets."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vllm_kvselect.evaluation.settings import FULL

_MOST_DEPTHS = 10


def pictures(frame: pd.DataFrame) -> dict[str, Figure]:
    """Draws what scored predictions allow, by name.

    A heat map of each method where depths are known at several lengths, and the mean over budgets
    in each scenario.
    """
    found: dict[str, Figure] = {}
    for scenario, part in frame.groupby("scenario", sort=False):
        deep = part[part["depth"].notna()]
        if deep["length"].nunique() > 1:
            for method in deep["method"].unique():
                lines = deep[deep["method"].isin((FULL, method))]
                found[f"depths-{scenario}-{method}"] = _heat_map(lines, f"{method}, {scenario}")
        counted = part[part["solved"]]
        if counted["budget_text"].nunique() > 2:
            found[f"budgets-{scenario}"] = _curves(counted, f"{scenario}")
    return found


def _heat_map(lines: pd.DataFrame, title: str) -> Figure:
    """A panel for each budget, the full cache's first; depth downwards, lengths to the right."""
    num_depths = min(_MOST_DEPTHS, lines.groupby("length")["example"].nunique().min())
    borders = [i / num_depths for i in range(num_depths + 1)]
    depths = pd.cut(lines["depth"], borders, include_lowest=True)
    budgets = list(dict.fromkeys(lines["budget_text"]))
    figure = Figure(figsize=(1.2 + 2.4 * len(budgets), 3.6), layout="constrained")
    panels = figure.subplots(1, len(budgets), squeeze=False, sharey=True)
    for panel, budget in zip(panels.flat, budgets, strict=True):
        part = lines[lines["budget_text"] == budget]
        table = part.pivot_table("score", depths, "length", observed=False, dropna=False)
        image = panel.imshow(table, aspect="auto", cmap="RdYlGn", vmin=0, vmax=1)
        panel.set_title("all entries" if budget == "None" else f"budget {budget}", fontsize=9)
        panel.set_xticks(
            range(len(table.columns)), [str(each) for each in table.columns], fontsize=8
        )
        panel.set_xlabel("tokens", fontsize=9)
        panel.set_yticks(
            [border * num_depths - 0.5 for border in borders], [f"{each:.0%}" for each in borders]
        )
    panels.flat[0].set_ylabel("depth of the needle", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(image, ax=panels, label="score")
    return figure


def _curves(counted: pd.DataFrame, title: str) -> Figure:
    """A line a method over the share of entries that is kept, the full cache as a level."""
    means = counted.groupby(["method", "budget_text", "task", "length"], sort=False).agg(
        score=("score", "mean"), retained=("retained", "mean")
    )
    means = means.groupby(["method", "budget_text"], sort=False).mean().reset_index()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method, line in means.groupby("method", sort=False):
        if method == FULL:
            axes.axhline(line["score"].iloc[0], color="grey", linestyle="--", label="full cache")
        else:
            line = line.sort_values("retained")
            axes.plot(line["retained"], line["score"], marker="o", markersize=3, label=method)
    axes.set_xscale("log")
    axes.set_xlabel("entries kept")
    axes.set_ylabel("score, mean over tasks")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_minor_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure
