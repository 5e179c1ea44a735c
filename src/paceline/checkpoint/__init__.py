"""WHAT survives? A folder a checkpoint: safetensors, JSON, and a manifest that is renamed into place last."""
