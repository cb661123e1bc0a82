"""The kinds of pictures: heat maps by layer and head, and curves."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Matrix = Sequence[Sequence[float]]
Curves = dict[str, tuple[Sequence[float], Sequence[float]]]
"""By name: x and y."""


class Scale(NamedTuple):
    """Colours of a heat map.

    Attributes:
        label: What the colours mean.
        low: Value of the first colour.
        high: Value of the last colour.
        colours: Name of a colour map.
    """

    label: str
    low: float
    high: float
    colours: str = "viridis"


class Axes(NamedTuple):
    """Axes of curves.

    Attributes:
        x: What lies along x.
        y: What lies along y.
        budgets: Whether x are budgets, which need a logarithmic scale.
        level: A value of y to draw a line at.
    """

    x: str
    y: str
    budgets: bool = False
    level: float | None = None


def heat_maps(panels: Mapping[str, Matrix], scale: Scale) -> Figure:
    """Draws `[num_layers][num_heads]` matrices side by side, layers downwards.

    Args:
        panels: Matrices by title.
        scale: Colours, the same in all panels.

    Returns:
        The figure.
    """
    num_columns = min(len(panels), 4)
    num_rows = ceil(len(panels) / num_columns)
    size = (0.8 + 1.9 * num_columns, 3.8 * num_rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True)
    for axis, (title, matrix) in zip(axes.flat, panels.items(), strict=False):
        image = axis.imshow(
            matrix,
            aspect="auto",
            cmap=scale.colours,
            vmin=scale.low,
            vmax=scale.high,
            interpolation="nearest",
        )
        axis.set_title(title, fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("head", fontsize=10)
    figure.supylabel("layer", fontsize=10)
    figure.colorbar(image, ax=axes, label=scale.label)
    return figure


def curves(panels: Mapping[str, Curves], scale: Axes) -> Figure:
    """Draws curves side by side; a curve has the same colour in every panel.

    Args:
        panels: By title, curves by name: their x and y.
        scale: The axes, the same in all panels.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(0.8 + 3.6 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for number, (name, (x, y)) in enumerate(lines.items()):
            marker = "o" if len(x) < 15 else ""
            axis.plot(x, y, marker=marker, markersize=3.5, color=f"C{number}", label=name)
        if scale.level is not None:
            axis.axhline(scale.level, color="0.5", linewidth=0.8, linestyle="--")
        if scale.budgets:
            axis.set_xscale("log")
            ticks = sorted({each for x, _ in lines.values() for each in x})
            labels = [f"{each:.3g}" if each > 1 else f"{100 * each:.3g} %" for each in ticks]
            axis.set_xticks(ticks, labels, fontsize=8)
            axis.minorticks_off()
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(scale.x)
        axis.grid(visible=True, color="0.9")
    axes[0].set_ylabel(scale.y)
    axes[-1].legend(fontsize=8)
    return figure
