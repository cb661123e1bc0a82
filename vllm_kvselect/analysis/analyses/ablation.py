"""Ablation: a method with one option changed at a time, in paired differences to itself."""

from collections import defaultdict
from math import nan
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from vllm_kvselect.analysis.answers import forced
from vllm_kvselect.analysis.figures import Intervals, intervals
from vllm_kvselect.analysis.report import Findings
from vllm_kvselect.analysis.retained import retained_entries
from vllm_kvselect.analysis.statistics import difference_text, mean_and_error
from vllm_kvselect.analysis.study import Study
from vllm_kvselect.analysis.tasks import Scenario
from vllm_kvselect.config import EvictionConfig

CHANGES: tuple[tuple[str, Any], ...] = (
    ("lam", 0.0),
    ("lam", 0.15),
    ("lam", 15.0),
    ("safeguard", 0.0),
    ("safeguard", 0.5),
    ("alpha", 0.0),
    ("alpha", 1.0),
    ("stage_2_scores", "unpooled"),
)
"""Options of ThetaKV and what they are changed to."""

NORMAL_95 = 1.96


class _Quality(NamedTuple):
    """Of one answer: nats per token, share of likeliest tokens, and the first of both in full."""

    nll: float
    top_1: float
    full_nll: float


Variant = tuple[str, int | float]
"""Name and budget."""


def measure_ablation(study: Study) -> Findings:
    """Forces the answers on what every variant retains.

    The last of the methods is varied; all others stand beside it as they are.

    Args:
        study: Model, texts and settings.

    Returns:
        Likelihood and accuracy, and differences to the unchanged method on the same texts.
    """
    evictions = {
        (name, eviction.budget): eviction
        for each in study.config.evictions()
        for name, eviction in _variants(each, study.config.methods[-1])
    }
    names = {eviction: variant for variant, eviction in evictions.items()}
    found: dict[tuple[Scenario, Variant], list[_Quality]] = defaultdict(list)
    for _, eviction, sample in study.walk(list(evictions.values())):
        continued = sample.continued(retained_entries(sample.prompt, eviction))
        full_nll, _ = forced(sample.full.logits, sample.case.answer)
        quality = _Quality(*forced(continued.logits, sample.case.answer), full_nll)
        found[sample.scenario, names[eviction]].append(quality)
    base = study.config.methods[-1]
    differences = {
        (scenario, (name, budget)): [
            ours.nll - theirs.nll
            for ours, theirs in zip(qualities, found[scenario, (base, budget)], strict=True)
        ]
        for (scenario, (name, budget)), qualities in found.items()
    }
    return Findings(
        columns=("scenario", "budget", "variant", "NLL", "minus full", f"minus {base}", "top-1"),
        rows=[_row(*place, qualities, differences[place]) for place, qualities in found.items()],
        results={
            "variants": [
                {
                    "scenario": scenario,
                    "variant": name,
                    "budget": budget,
                    "texts": [each._asdict() for each in qualities],
                }
                for (scenario, (name, budget)), qualities in found.items()
            ]
        },
        figures={"differences": _figure(base, differences)},
        notes=[
            "NLL: nats per answer token but the first, teacher-forced; differences are paired over "
            "the texts, with 95 % intervals unless there is one text only; below 0 is better."
        ],
    )


def _variants(eviction: EvictionConfig, varied: str) -> list[tuple[str, EvictionConfig]]:
    variants: list[tuple[str, EvictionConfig]] = [(eviction.method, eviction)]
    if eviction.method == varied:
        for field, value in CHANGES:
            if getattr(eviction, field) != value:
                changed = EvictionConfig.parse({**eviction.model_dump(), field: value})
                variants.append((f"{field} {value}", changed))
    return variants


def _row(
    scenario: Scenario, variant: Variant, qualities: list[_Quality], differences: list[float]
) -> tuple[str, ...]:
    name, budget = variant
    return (
        scenario,
        str(budget),
        name,
        f"{mean_and_error([each.nll for each in qualities])[0]:.3f}",
        _interval([each.nll - each.full_nll for each in qualities]),
        _interval(differences) if any(differences) else "",
        f"{mean_and_error([each.top_1 for each in qualities])[0]:.0%}",
    )


def _interval(values: list[float]) -> str:
    return difference_text(*_mean_and_reach(values))


def _mean_and_reach(values: list[float]) -> tuple[float, float | None]:
    """A mean, and how far its 95 % interval reaches to both sides; None for a single value."""
    mean, error = mean_and_error(values)
    return mean, None if error is None else NORMAL_95 * error


def _figure(base: str, differences: dict[tuple[Scenario, Variant], list[float]]) -> Figure:
    panels: dict[str, Intervals] = {}
    for (scenario, (name, budget)), values in differences.items():
        if name != base:
            mean, reach = _mean_and_reach(values)
            panels.setdefault(f"{scenario}, {budget}", {})[name] = (
                mean,
                nan if reach is None else reach,
            )
    return intervals(panels, f"NLL minus that of {base}, nats per token")
