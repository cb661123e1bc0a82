"""The documentation's pictures from docs/data, and RULER's shares: `make figures`."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_kvselect.offline.intervals import interval

DOCS = Path(__file__).resolve().parents[1] / "docs"
STOCK, PLUGIN, OTHER = "#8a8f98", "#3f6fb5", "#c98a3b"
TASKS = ("number", "one of eight", "prose", "code", "niah_single_1", "niah_single_2")
METHODS = {"layer-probe": PLUGIN, "layer-defensivekv": OTHER}


def main() -> None:
    """Draws them into docs/figures."""
    figure = Figure(figsize=(11, 3.1), layout="constrained")
    throughput, memory, quality = figure.subplots(1, 3)
    card = pd.read_csv(DOCS / "data/h100.csv", comment="#")
    _throughput(throughput, card)
    _memory(memory, card)
    _quality(quality, pd.read_csv(DOCS / "data/sixteenth-methods.csv", comment="#"))
    figure.savefig(DOCS / "figures/overview.png", dpi=110)
    figure = Figure(figsize=(8, 3.1), layout="constrained")
    scores = pd.read_csv(DOCS / "data/ruler-4096.csv", comment="#")
    models = scores.groupby("model", sort=False)
    for panel, (model, rows) in zip(figure.subplots(1, len(models)), models, strict=True):
        shares = _shares(rows)
        print(model, (100 * shares).round(1).to_string(), sep="\n")
        title, others = f"RULER, 4,096 tokens, {model}", {"adakv-perturb": STOCK}
        _by_budget(panel, title, shares["score"], others)
    figure.savefig(DOCS / "figures/ruler.png", dpi=110)


def _throughput(panel: Axes, card: pd.DataFrame) -> None:
    rows = card[card["work"] == "12 x 16384 -> 1024"]
    names = rows["engine"] + ",\n" + rows["pool_gib"].map("{:g} GiB".format)
    colors = [PLUGIN if engine == "plugin" else STOCK for engine in rows["engine"]]
    bars = panel.bar(names, 12 * 1024 / rows["seconds"], color=colors)
    panel.bar_label(bars, [f"{count:.0f} at once" for count in rows["at_once"]], fontsize=8)
    panel.margins(y=0.12)
    _label(panel, "12 prompts of 16,384 tokens (H100, 8B)", "", "tokens generated a second")


def _memory(panel: Axes, card: pd.DataFrame) -> None:
    alone = card[card["cache_used"].notna()]
    for name, color in (("stock", STOCK), ("plugin, a cut every 4096", PLUGIN)):
        rows = alone[alone["engine"] == name]
        tokens = rows["work"].str.split().str[0].astype(int) / 1000
        panel.plot(tokens, rows["cache_used"], "o-", color=color, label=name)
        seconds = rows["first_token_seconds"].map("{:.1f} s".format)
        for x, y, text in zip(tokens, rows["cache_used"], seconds, strict=True):
            panel.annotate(text, (x, y), (-4, 5), textcoords="offset points", fontsize=7)
    panel.set_ylim(0, 110)
    panel.legend(fontsize=7)
    title = "a prompt alone, with its first token's time"
    _label(panel, title, "thousand tokens", "of 16.5 GiB of KV cache, %")


def _quality(panel: Axes, rows: pd.DataFrame) -> None:
    rows = rows[(rows["length"] == 4096) & (rows["scenario"] == "regular")]
    rows = rows[rows["task"].isin(TASKS)]
    full = rows[rows["method"] == "none"].set_index("task")["likeliest"]
    rows = rows.assign(share=rows["likeliest"] / rows["task"].map(full))
    means = rows.groupby(["method", "budget"])["share"].mean()
    _by_budget(panel, "answers of a small model, 4,096 tokens", means, {"random": STOCK})


def _shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Score and likeliest tokens by method and budget, as shares of the full cache's."""
    found, index, columns = rows.fillna({"budget": 1}), ["task", "text"], ["method", "budget"]
    tables = [
        found.pivot(index=index, columns=columns, values=name) for name in ("score", "likeliest")
    ]
    settings = tables[0].columns.drop([("none", 1)])
    lines = [[part for table in tables for part in _share(table, each)] for each in settings]
    names = ["score", "from", "to", "likeliest", "from", "to"]
    return pd.DataFrame(lines, settings, names).sort_index()


def _share(table: pd.DataFrame, setting: tuple[str, float]) -> tuple[float, float, float]:
    """A mean as a share of the full cache's of the same texts, and its interval; without one, NaN.

    Tasks weigh the same, whatever the full cache reaches in them.
    """
    pairs = table[[setting, ("none", 1)]].dropna().groupby("task")
    tasks = [part.to_numpy() for _, part in pairs]

    def share(*picks: np.ndarray) -> float:
        parts = [task[pick].mean(axis=0) for task, pick in zip(tasks, picks, strict=True)]
        own, full = np.mean(parts, axis=0)
        return float(own / full)

    texts = [np.arange(len(task)) for task in tasks]
    return share(*texts), *(interval(texts, share) or (np.nan, np.nan))


def _by_budget(panel: Axes, title: str, shares: pd.Series, others: dict[str, str]) -> None:
    """A line a method; shares of the full cache's score are indexed by method and budget."""
    for name, color in (METHODS | others).items():
        kept = [f"1/{1 / budget:.0f}" for budget in shares[name].index]
        panel.plot(kept, 100 * shares[name], "o-", color=color, label=name)
    panel.set_ylim(0, 110)
    panel.legend(fontsize=7)
    _label(panel, title, "entries kept", "of the full cache's, %")


def _label(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    panel.tick_params(labelsize=8)


if __name__ == "__main__":
    main()
