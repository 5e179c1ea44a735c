"""PyTorch models, optimizers and data loaders in a worker."""
