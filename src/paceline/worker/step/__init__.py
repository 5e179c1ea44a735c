"""Make one training step with the cluster: push the gradient, take the newest parameters."""
