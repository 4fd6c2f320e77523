"""The worker: model runner, cache engine, sampler."""
