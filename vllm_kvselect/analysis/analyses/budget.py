"""Quality against budget: the answer's likelihood on the dropped cache, down to 1 %."""

from collections import defaultdict
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from vllm_kvselect.analysis.answers import forced
from vllm_kvselect.analysis.figures import Axes, Curves, curves
from vllm_kvselect.analysis.report import Findings
from vllm_kvselect.analysis.retained import retained_entries
from vllm_kvselect.analysis.settings import AnalysisConfig
from vllm_kvselect.analysis.statistics import difference_text, mean_and_error
from vllm_kvselect.analysis.study import Sample, Setting, Study


class _Quality(NamedTuple):
    """Means over an answer's tokens but the first, which comes out of the prefill.

    Attributes:
        nll: Negative log-likelihood, nats per token.
        top_1: Share of tokens that are the likeliest.
        full_nll: The first with the full cache.
        full_top_1: The second with the full cache.
        entries: Entries retained per KV head and layer.
    """

    nll: float
    top_1: float
    full_nll: float
    full_top_1: float
    entries: float


Found = dict[Setting, list[_Quality]]
"""By setting, one a text."""


def measure_budget(study: Study) -> Findings:
    """Forces the answers on the dropped cache, and on the full one.

    Args:
        study: Model, texts and settings.

    Returns:
        Likelihood and accuracy by method and budget, paired with the full cache.
    """
    config = study.config
    found: Found = defaultdict(list)
    for setting, eviction, sample in study.walk():
        retained = retained_entries(sample.prompt, eviction)
        found[setting].append(_quality(sample, retained))
    rows = []
    for setting, qualities in found.items():
        if setting[1:] == (config.methods[0], config.budgets[0]):
            rows.append(_full_row(setting.scenario, qualities))
        rows.append(_row(setting, qualities))
    columns = ("scenario", "method", "budget", "entries", "NLL", "minus full", "top-1")
    return Findings(
        columns=columns,
        rows=rows,
        results={
            "settings": [
                {**setting._asdict(), "texts": [each._asdict() for each in qualities]}
                for setting, qualities in found.items()
            ]
        },
        figures={"nll": _figure(config, found)},
        notes=[
            "NLL: nats per answer token but the first, teacher-forced; *minus full*: paired, with "
            "its standard error, unless there is one text only; *entries*: retained per KV head "
            f"and layer, of which the window takes {config.evictions()[0].window}."
        ],
    )


def _quality(sample: Sample, retained: torch.Tensor) -> _Quality:
    num_retained = retained.double().sum(-1).mean().item()
    dropped = forced(sample.continued(retained).logits, sample.case.answer)
    return _Quality(*dropped, *forced(sample.full.logits, sample.case.answer), num_retained)


def _row(setting: Setting, qualities: list[_Quality]) -> tuple[str, ...]:
    difference, error = mean_and_error([each.nll - each.full_nll for each in qualities])
    return (
        setting.scenario,
        setting.method,
        str(setting.budget),
        f"{mean_and_error([each.entries for each in qualities])[0]:.0f}",
        f"{mean_and_error([each.nll for each in qualities])[0]:.3f}",
        difference_text(difference, error),
        f"{mean_and_error([each.top_1 for each in qualities])[0]:.0%}",
    )


def _full_row(scenario: str, qualities: list[_Quality]) -> tuple[str, ...]:
    nll = mean_and_error([each.full_nll for each in qualities])[0]
    top_1 = mean_and_error([each.full_top_1 for each in qualities])[0]
    return (scenario, "full cache", "", "all", f"{nll:.3f}", "", f"{top_1:.0%}")


def _figure(config: AnalysisConfig, found: Found) -> Figure:
    panels: dict[str, Curves] = {}
    for scenario in config.scenarios:
        lines: Curves = {}
        for method in config.methods:
            own = [found[Setting(scenario, method, budget)] for budget in config.budgets]
            means = [mean_and_error([each.nll for each in one])[0] for one in own]
            lines[method] = (config.budgets, means)
        level = mean_and_error([each.full_nll for each in own[0]])[0]
        lines["full cache"] = ([min(config.budgets), max(config.budgets)], [level, level])
        panels[scenario] = lines
    return curves(panels, Axes("budget", "NLL of the answer, nats per token", True))
