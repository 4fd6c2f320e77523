"""A model of ours as the folder other engines read: config.json, safetensors, tokenizer.

Usage: python -m tests.bench.peer_model MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.config import EngineConfig

if TYPE_CHECKING:
    from pagewire_engine.model_files import ModelDescription


def write_peer_model(model: str, folder: Path) -> Path:
    """Writes the model in fp32 (a GGUF dequantised) unless the folder has it.

    Returns:
        The folder.
    """
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    import torch
    from safetensors.torch import save_file

    from pagewire_engine.model_files import load_description, resolve_model
    from pagewire_engine.models.weight_loading import load_model
    from pagewire_engine.tokenizer_files import load_tokenizer_files

    config = EngineConfig(model=model)
    files = resolve_model(config)
    description = load_description(files, config)
    loaded = load_model(
        files, description, dtype=torch.float32, device=torch.device("cpu"), dummy_seed=None
    )
    tensors = {
        name: place.detach().clone().contiguous()
        for name, place in loaded.checkpoint_tensors().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in load_tokenizer_files(files.path, files.gguf, mode="auto").items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(_config(description), indent=2))
    # The weights come last: they mark the folder as whole.
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(weights)
    return folder


def _config(description: ModelDescription) -> dict[str, Any]:
    """config.json; a GGUF's config is a plain namespace, a folder's is transformers' own."""
    own = description.hf_config
    fields = own.to_dict() if hasattr(own, "to_dict") else vars(own)
    config = {name: value for name, value in fields.items() if value is not None}
    config["architectures"] = [description.architecture]
    config["dtype"] = "float32"
    config["eos_token_id"] = description.eos_token_ids[0]
    return config


if __name__ == "__main__":
    print(write_peer_model(sys.argv[1], Path(sys.argv[2])))
