"""A model to time, of the shape of Granite 4 H 350M: of each four layers three keep states.

Its weights are random, and half of its 32 layers are left out. The tokenizer is the small model's.

    python benchmarks/hybrid_shape.py FOLDER
    python benchmarks/throughput.py --model FOLDER ...
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from _engine import default_model
from transformers import AutoTokenizer, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM


def main(
    folder: Annotated[Path, typer.Argument(help="Made for it.")],
    num_layers: Annotated[int, typer.Option(min=4)] = 16,
) -> None:
    """Makes the model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    config = GraniteMoeHybridConfig(
        vocab_size=len(tokenizer),
        hidden_size=768,
        shared_intermediate_size=2048,
        num_hidden_layers=num_layers,
        layer_types=["mamba", "mamba", "mamba", "attention"] * (num_layers // 4),
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=0,
        position_embedding_type="nope",
        max_position_embeddings=32768,
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
    )
    torch.manual_seed(0)
    GraniteMoeHybridForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
