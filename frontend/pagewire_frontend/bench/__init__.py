"""`pagewire bench`: latency and throughput of a model, loaded here or served elsewhere."""
