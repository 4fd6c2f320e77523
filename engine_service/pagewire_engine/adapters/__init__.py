"""LoRA adapters: their files, which are loaded, and whose turn it is."""
