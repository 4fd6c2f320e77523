"""Text to tokens and back, and the public APIs."""
