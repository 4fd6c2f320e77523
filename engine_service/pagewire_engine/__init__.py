"""The engine: scheduler, block space manager, workers, models."""
