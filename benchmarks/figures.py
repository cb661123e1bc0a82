"""The pictures of the documentation that are made from docs/data: `make figures`."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
        _ruler(panel, f"RULER, 4,096 tokens, {model}", rows)
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


def _ruler(panel: Axes, title: str, rows: pd.DataFrame) -> None:
    """Tasks weigh the same, whatever the full cache scores in them."""
    by_task = rows.fillna({"budget": 1}).groupby(["method", "budget", "task"])["score"].mean()
    means = by_task.groupby(["method", "budget"]).mean()
    _by_budget(panel, title, means / means["none", 1], {"adakv-perturb": STOCK})


def _by_budget(panel: Axes, title: str, shares: pd.Series, others: dict[str, str]) -> None:
    """A line a method; shares of the full cache's score are indexed by method and budget."""
    for name, color in (METHODS | others).items():
        kept = [f"1/{1 / budget:.0f}" for budget in shares[name].index]
        panel.plot(kept, 100 * shares[name], "o-", color=color, label=name)
    panel.set_ylim(0, 105)
    panel.legend(fontsize=7)
    _label(panel, title, "entries kept", "of the full cache's, %")


def _label(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    panel.tick_params(labelsize=8)


if __name__ == "__main__":
    main()
