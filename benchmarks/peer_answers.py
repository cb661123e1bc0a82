"""Peers' answers to the examples of an evaluation, each by its own engine and methods.

    vllm-kvselect evaluate ruler --out mine ...
    python benchmarks/peer_answers.py kvpress mine --methods kvzip
    vllm-kvselect evaluate ruler --out mine ... --also mine/kvpress.jsonl

A peer's packages are installed into an environment of its own, on first use.
"""

from pathlib import Path
from typing import Annotated

import typer
from _engine import run_script
from peers import kvpress, openvino
from peers.answers import PeerConfig, examples_of
from peers.methods import PEER_METHODS

from vllm_kvselect.evaluation.predictions import read, write
from vllm_kvselect.offline.parsing import parse_number, parts

RUNNERS = {"kvpress": kvpress.answer, "openvino": openvino.answer}


def main(
    peer: Annotated[str, typer.Argument(help=f"{' or '.join(PEER_METHODS)}.")],
    evaluation: Annotated[Path, typer.Argument(help="Folder of an evaluation.")],
    methods: Annotated[str, typer.Option(help="By commas; by default all of the peer's.")] = "",
    scenarios: Annotated[str, typer.Option(help="regular, context-only, or both.")] = "regular",
    budgets: Annotated[
        str, typer.Option(help="By commas: 0.25 of the prompt, or entries.")
    ] = "0.5,0.25,0.125",
) -> None:
    """Answers what is not answered yet, and writes it into the folder."""
    config = PeerConfig.of(
        evaluation,
        peer=peer,
        methods=parts(methods) or PEER_METHODS.get(peer, ()),
        scenarios=parts(scenarios),
        budgets=[parse_number(each) for each in parts(budgets)],
    )
    path = evaluation / f"{peer}.jsonl"
    done = {(each.example, each.setting) for each in read(path)}
    for predictions in RUNNERS[config.peer](config, examples_of(evaluation), done):
        write(predictions, path)
    typer.echo(path)


if __name__ == "__main__":
    run_script(main)
