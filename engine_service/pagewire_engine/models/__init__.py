"""Model architectures on plain torch.nn modules."""
