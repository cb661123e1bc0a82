import numpy as np
import pytest
from papers.figures import Axes, Scale, curves, heat_maps


@pytest.mark.parametrize("num_panels", [1, 4, 6])
def test_heat_maps_show_their_matrices(num_panels: int) -> None:
    matrices = {f"panel {n}": [[n, 1.0, 2.0], [3.0, 4.0, 5.0]] for n in range(num_panels)}
    figure = heat_maps(matrices, Scale("share", 0, 5))
    panels = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in panels] == list(matrices)
    for axis, matrix in zip(panels, matrices.values(), strict=True):
        np.testing.assert_array_equal(axis.images[0].get_array(), matrix)
        assert axis.images[0].get_clim() == (0, 5)
    (bar,) = [axis for axis in figure.axes if axis.get_ylabel() == "share"]
    assert bar not in panels


def test_curves_have_the_same_colour_in_every_panel() -> None:
    lines = {"one": ([0.1, 0.2], [1.0, 2.0]), "two": ([0.1, 0.2], [3.0, 4.0])}
    figure = curves({"left": lines, "right": lines}, Axes("budget", "quality", budgets=True))
    for axis in figure.axes:
        drawn = {line.get_label(): line for line in axis.lines}
        assert list(drawn) == list(lines)
        assert [line.get_color() for line in drawn.values()] == ["C0", "C1"]
        for name, (x, y) in lines.items():
            assert (list(drawn[name].get_xdata()), list(drawn[name].get_ydata())) == (x, y)
        assert [label.get_text() for label in axis.get_xticklabels()] == ["10 %", "20 %"]
