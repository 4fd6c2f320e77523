"""How the frontend reaches an engine: over the wires, or in its own process."""
