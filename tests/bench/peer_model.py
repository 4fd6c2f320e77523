"""A model of ours as the folder other engines read: config.json, safetensors, tokenizer.

Usage: python -m tests.bench.peer_model MODEL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from pagewire.config import EngineConfig


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
    hf_config = description.hf_config
    hf_config.architectures = [description.architecture]
    hf_config.dtype = "float32"
    hf_config.save_pretrained(folder)
    # The weights come last: they mark the folder as whole.
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(weights)
    return folder


if __name__ == "__main__":
    print(write_peer_model(sys.argv[1], Path(sys.argv[2])))
