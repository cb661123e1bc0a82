"""The first layers of a model: real weights, real tokens, a real engine, many steps a second."""

import json
import shutil
from pathlib import Path


def shallow_copy(model: Path, num_layers: int, folder: Path) -> Path:
    """Copies a Llama-like model cut down to its first layers.

    Args:
        model: Folder of the model, its weights in one `model.safetensors`.
        num_layers: Layers to keep.
        folder: Folder to make.

    Returns:
        The folder.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    kept = {
        name: weight
        for name, weight in load_file(model / "model.safetensors").items()
        if "layers." not in name or int(name.split(".")[2]) < num_layers
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
