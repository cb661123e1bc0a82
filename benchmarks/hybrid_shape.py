"""A model to time, of the shape of LFM2 350M: of 16 layers six attend, ten are short convolutions.

Its weights are random, and `--num-layers` leaves some out. The tokenizer is the small model's.

    python benchmarks/hybrid_shape.py FOLDER
    python benchmarks/throughput.py --model FOLDER ...
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from _engine import default_model
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

ATTENDING = (2, 5, 8, 10, 12, 14)


def main(
    folder: Annotated[Path, typer.Argument(help="Made for it.")],
    num_layers: Annotated[int, typer.Option(min=3, help="The first ones.")] = 16,
) -> None:
    """Makes the model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    kinds = ["full_attention" if layer in ATTENDING else "conv" for layer in range(num_layers)]
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        block_dim=1024,
        block_ff_dim=6656,
        conv_dim=1024,
        num_hidden_layers=num_layers,
        layer_types=kinds,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    Lfm2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
