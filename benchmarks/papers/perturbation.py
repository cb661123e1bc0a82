"""How far eviction moves each head's output, and the hidden states when all layers evict."""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from papers.figures import Axes, Curves, Scale, curves, heat_maps
from papers.quantities import distance
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


class _Moved(NamedTuple):
    """What eviction moved, by setting.

    Attributes:
        heads: L1 distance of head outputs, `[num_texts, num_layers, num_heads]`.
        hidden: Relative L1 distance of hidden states, `[num_texts, num_layers + 1]`.
    """

    heads: dict[Setting, torch.Tensor]
    hidden: dict[Setting, torch.Tensor]


def measure_perturbation(study: Study) -> Findings:
    """Measures the papers' perturbation, with the second stage and without.

    Per head, each layer evicts by itself: the L1 distance of the head's output, through W_O, to
    the full cache's, averaged over the tokens that follow the prompt. Layer by layer, the model
    runs on the dropped cache of all layers: relative L1 distance of its hidden states.

    Args:
        study: Model, texts and settings.

    Returns:
        Shares of heads that improve, heat maps, curves.
    """
    config, moved = study.config, _measure(study)
    shares = [
        _compare(moved, Setting(scenario, method, budget), against, study.num_kv_heads)
        for scenario in config.scenarios
        for method, against in config.pairs()
        for budget in config.budgets
    ]
    figures = {"layers": _layers_figure(config, moved)}
    if shares:
        figures |= {"heads": _heads_figure(config, moved), "shares": _shares_figure(shares)}
    settings = [
        {
            **setting._asdict(),
            "heads": rounded(moved.heads[setting].mean(0)),
            "hidden": rounded(moved.hidden[setting].mean(0)),
        }
        for setting in moved.heads
    ]
    columns = ("scenario", "method", "against", "budget", "heads lower", "95 %", "KV heads")
    return Findings(
        columns=(*columns, "sum", "last hidden state", "against"),
        rows=[_row(share) for share in shares],
        results={"shares": shares, "settings": settings},
        figures=figures,
        notes=[
            "*heads lower*: share of (layer, query head) whose distance, averaged over texts and "
            "following tokens, is lower with the method than with the one it stands against; "
            "interval: bootstrap over the texts, none for a single one; *KV heads*: the same, "
            "summed over the query group. *sum*: of all distances, the method's over the other's. "
            "*last hidden state*: relative L1 distance when all layers evict, of the method and of "
            "the other."
        ],
    )


def _measure(study: Study) -> _Moved:
    heads: dict[Setting, list[torch.Tensor]] = defaultdict(list)
    hidden: dict[Setting, list[torch.Tensor]] = defaultdict(list)
    for setting, eviction, sample in study.walk():
        retained = retained_entries(sample.prompt, eviction)
        heads[setting].append(sample.head_distances(retained))
        full, dropped = sample.full.hidden_states, sample.continued(retained).hidden_states
        size = full.abs().sum(dim=-1).mean(dim=-1)
        hidden[setting].append(distance(full, dropped).mean(dim=-1) / size)
    return _Moved(
        {setting: torch.stack(values) for setting, values in heads.items()},
        {setting: torch.stack(values) for setting, values in hidden.items()},
    )


def _compare(moved: _Moved, setting: Setting, against: str, num_kv_heads: int) -> dict[str, Any]:
    """Shares of heads whose distance is lower than with another method."""
    base = setting._replace(method=against)
    one, two = moved.heads[base], moved.heads[setting]
    groups = [each.unflatten(-1, (num_kv_heads, -1)).sum(-1) for each in (one, two)]
    return {
        **setting._asdict(),
        "against": against,
        "heads_lower": share_lower(one, two),
        "interval": share_interval(one, two),
        "heads_and_texts_lower": (two < one).double().mean().item(),
        "kv_heads_lower": share_lower(*groups),
        "heads_lower_by_layer": rounded((two.mean(0) < one.mean(0)).double().mean(-1)),
        "ratio": (two.sum() / one.sum()).item(),
        "last_hidden": [moved.hidden[each][:, -1].mean().item() for each in (setting, base)],
    }


def _row(share: dict[str, Any]) -> tuple[str, ...]:
    return (
        share["scenario"],
        share["method"],
        share["against"],
        str(share["budget"]),
        f"{share['heads_lower']:.1%}",
        interval_text(share["interval"]),
        f"{share['kv_heads_lower']:.1%}",
        f"{share['ratio']:.3f}",
        *(f"{moved:.4f}" for moved in share["last_hidden"]),
    )


def _heads_figure(config: AnalysisConfig, moved: _Moved) -> Figure:
    """How much lower the distance of every head is at the headline budget."""
    panels = {}
    for scenario in config.scenarios:
        for method, against in config.pairs():
            setting = Setting(scenario, method, config.headline_budget)
            two = moved.heads[setting].mean(0)
            one = moved.heads[setting._replace(method=against)].mean(0)
            panels[f"{method}\n{scenario}"] = rounded(100 * (1 - two / one))
    label = f"distance lower by, % (budget {config.headline_budget})"
    return heat_maps(panels, Scale(label, -50, 50, "RdBu"))


def _shares_figure(shares: list[dict[str, Any]]) -> Figure:
    panels: dict[str, Curves] = {}
    for scenario, method in dict.fromkeys((each["scenario"], each["method"]) for each in shares):
        own = [each for each in shares if (each["scenario"], each["method"]) == (scenario, method)]
        panels.setdefault(scenario, {})[method] = (
            [each["budget"] for each in own],
            [100 * each["heads_lower"] for each in own],
        )
    return curves(panels, Axes("budget", "heads with lower perturbation, %", True, 50))


def _layers_figure(config: AnalysisConfig, moved: _Moved) -> Figure:
    """Hidden states after every layer at the headline budget, all layers evicting."""
    panels: dict[str, Curves] = {}
    for scenario in config.scenarios:
        lines: Curves = {}
        for method in config.methods:
            hidden = moved.hidden[Setting(scenario, method, config.headline_budget)].mean(0)
            lines[method] = (list(range(len(hidden))), rounded(hidden))
        panels[scenario] = lines
    label = f"relative L1 distance (budget {config.headline_budget})"
    return curves(panels, Axes("hidden state", label))
