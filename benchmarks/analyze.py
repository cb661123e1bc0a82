"""The papers' analysis: what eviction does to the attention of a transformers model.

docs/research.md has what it found.
"""

import time
from typing import Annotated, Any

import typer
from _engine import run_script
from papers import report
from papers.analyses import ANALYSES
from papers.settings import AnalysisConfig
from papers.study import Study

from vllm_kvselect.offline.parsing import assignment, with_options


@with_options(AnalysisConfig)
def main(
    values: dict[str, Any],
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the method: --set alpha=0.25.")
    ] = None,
) -> None:
    """Measures on a model and real texts what eviction does to its attention.

    perturbation: how far head outputs and hidden states move. assumption: the attention that stage
    1 gathers. bound: perturbation over its upper bound. alpha: the share of stage 1. metric: other
    distances. norms: whether L1 and L2 norms say the same. sparse-prefill: what sparse prefills
    read, the budget being what a segment reads.

    What answers lose, `vllm-kvselect evaluate` measures.
    """
    values["eviction"] = dict(map(assignment, setting or []))
    config = AnalysisConfig.parse(values)
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
