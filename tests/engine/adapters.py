"""LoRA adapters of random weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, ALPHA = 8, 16


def random_adapter(
    folder: Path, sizes: Mapping[str, tuple[int, int]], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Writes an adapter of some projections.

    Args:
        folder: Made for it.
        sizes: Outputs and inputs of each projection, by its module's name in the model.
        seed: Decides the weights.

    Returns:
        What it adds to each one's weight, `[num_out, num_in]` float32.
    """
    random, weights, added = torch.Generator().manual_seed(seed), {}, {}
    for name, (num_out, num_in) in sizes.items():
        a, b = (0.1 * torch.randn(*s, generator=random) for s in ((RANK, num_in), (num_out, RANK)))
        weights[f"base_model.model.{name}.lora_A.weight"] = a
        weights[f"base_model.model.{name}.lora_B.weight"] = b
        added[name] = ALPHA / RANK * (b @ a)
    modules = sorted({name.rpartition(".")[2] for name in sizes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return added
