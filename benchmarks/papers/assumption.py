"""The assumption of the theorems: stage 1 gathers more than half of the attention."""

from collections import defaultdict

import torch
from matplotlib.figure import Figure

from papers.figures import Axes, Curves, Scale, curves, heat_maps
from papers.quantities import mass, retained_attention
from papers.report import Findings
from papers.settings import AnalysisConfig
from papers.statistics import rounded
from papers.study import Sample, Setting, Study
from vllm_kvselect.choice import retain, score
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.norms import FirstStage
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.retained import Prompt, competing, tail_entries
from vllm_kvselect.registry import KNOWN_METHODS
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.selecting.selection import best_mask, stage_1_counts

HALF = 0.5
"""Above it the factor `2 - 1 / sum(N A)` of the bound is positive, and stage 2 lowers the bound."""


def measure_assumption(study: Study) -> Findings:
    """Measures the attention mass on the entries of stage 1 and the tail, per head and budget.

    The attention is that of the tokens that follow the prompt; what follows the prompt is always
    retained and counts.

    Args:
        study: Model, texts and settings.

    Returns:
        Mass per head, the heads that fail.
    """
    config = study.config
    gathered: dict[Setting, list[torch.Tensor]] = defaultdict(list)
    for setting, eviction, sample in study.walk():
        gathered[setting].append(_masses(sample, eviction))
    means = {setting: torch.stack(values).mean(0) for setting, values in gathered.items()}
    rows, settings = [], []
    for setting, mean in means.items():
        total, alone = mean
        failing = (total <= HALF).nonzero().tolist()
        layers = sorted({layer for layer, _ in failing})
        rows.append(
            (
                setting.scenario,
                setting.method,
                str(setting.budget),
                f"{total.mean():.3f}",
                f"{total.min():.3f}",
                f"{alone.mean():.3f}",
                f"{1 - len(failing) / total.numel():.1%}",
                _ranges(layers) or "none",
            )
        )
        settings.append(
            {
                **setting._asdict(),
                "mass": rounded(total),
                "mass_of_stage_1_alone": rounded(alone),
                "failing_layer_and_head": failing,
            }
        )
    columns = ("scenario", "method", "budget", "mass", "lowest head", "stage 1 alone")
    return Findings(
        columns=(*columns, "heads above 0.5", "layers with heads below"),
        rows=rows,
        results={"settings": settings},
        figures={
            "heads": _heads_figure(config, means),
            "budgets": _budgets_figure(config, means),
        },
        notes=[
            "*mass*: on stage 1, the tail and what follows the prompt, mean over heads; *stage 1 "
            "alone* leaves out tail and following tokens."
        ],
    )


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as people write them: 0-3, 7."""
    starts = [each for each in numbers if each - 1 not in numbers]
    ends = [each for each in numbers if each + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _masses(sample: Sample, eviction: EvictionConfig) -> torch.Tensor:
    """With and without what is retained anyway: `[2, num_layers, num_heads]`."""
    stage_1 = stage_1_entries(sample.prompt, eviction)
    with_tail = stage_1 | tail_entries(sample.prompt, eviction)
    masses = []
    for weights, first, both in zip(sample.attention, stage_1, with_tail, strict=True):
        alone = retained_attention(weights, first)[..., : sample.prompt.num_tokens]
        total = retained_attention(weights, both)
        masses.append(torch.stack((mass(total).mean(-1), mass(alone).mean(-1))))
    return torch.stack(masses, dim=1)


def stage_1_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Entries that the first stage of a method retains, the tail aside.

    Args:
        prompt: The prompt.
        config: Method, budget and parameters.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool. None of it if the budget covers it.

    Raises:
        EvaluationError: If the method has no two stages.
    """
    if not KNOWN_METHODS[config.method].norms.two_stages:
        raise EvaluationError(f"{config.method} does not select in two stages")
    entries = torch.zeros_like(tail_entries(prompt, config))
    if (cut := prompt.cut(config)) is not None:
        layers, size = competing(prompt, cut, config), prompt.block_size
        budgets = retain(layers, cut.num_packed, size, config, prompt.kernels).offsets.diff() * size
        candidates = score(Held.of(layers), config, prompt.kernels)
        of_stage_1 = stage_1_counts(budgets, config.of(FirstStage).alpha, config.num_first)
        scores = candidates.with_first(candidates.scores, config.num_first)
        first = best_mask(scores.flatten(0, 1), of_stage_1)
        entries[..., : scores.shape[-1]] = first.view_as(scores)
    return entries


def _heads_figure(config: AnalysisConfig, means: dict[Setting, torch.Tensor]) -> Figure:
    panels = {
        f"{method}, {scenario}": rounded(
            means[Setting(scenario, method, config.headline_budget)][0]
        )
        for scenario in config.scenarios
        for method in config.methods
    }
    label = f"attention mass of stage 1 and the tail (budget {config.headline_budget})"
    return heat_maps(panels, Scale(label, 0, 1, "RdBu"))


def _budgets_figure(config: AnalysisConfig, means: dict[Setting, torch.Tensor]) -> Figure:
    panels: dict[str, Curves] = {}
    for scenario in config.scenarios:
        lines = panels.setdefault(scenario, {})
        for method in config.methods:
            masses = [means[Setting(scenario, method, each)][0] for each in config.budgets]
            shares = [100 * (each > HALF).double().mean().item() for each in masses]
            lines[method] = (list(config.budgets), shares)
    return curves(panels, Axes("budget", "heads above 0.5, %", True, 100))
