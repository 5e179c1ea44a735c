"""Parameters, gradients and optimizer state of one ps, and the updates of them."""
