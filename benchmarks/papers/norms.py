"""Whether L1 and L2 norms of projected values say the same, on a real model and real texts."""

import torch

from papers.report import Findings
from papers.statistics import rounded
from papers.study import Study
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.scoring.value_norms import projected_value_l2_norms, projected_value_norms


def measure_norms(study: Study) -> Findings:
    """Measures how much the L1 norms of a layer's entries vary, and how much they do over the L2.

    Methods without a window multiply by the L2 norm over the layer's mean, which costs next to
    nothing.

    Args:
        study: Model and texts. Methods and budgets play no part.

    Returns:
        Standard deviations of logarithms over the entries of a layer.
    """
    (first, *_), scenario = study.config.evictions(), study.config.scenarios[0]
    spreads = torch.tensor(
        [
            [_spreads(layer) for layer in sample.layers]
            for setting, _, sample in study.walk([first])
            if setting.scenario == scenario
        ]
    ).mean(0)
    norms, ratios = spreads.T
    cells = tuple(f"{x:.3f}" for x in (norms.mean(), ratios.mean(), ratios.max()))
    return Findings(
        columns=("L1 norms", "L1 over L2", "the same, worst layer"),
        rows=[cells],
        results={"norms": rounded(norms), "ratios": rounded(ratios)},
        figures={},
        notes=["Standard deviations of logarithms, means over the texts and the layers."],
    )


def _spreads(layer: Layer) -> tuple[float, float]:
    given = layer.value, layer.output_projection
    l1, l2 = projected_value_norms(*given).log(), projected_value_l2_norms(*given).log()
    return l1.std().item(), (l1 - l2).std().item()
