"""WHICH files start a cluster elsewhere? Emitted for Docker, Kubernetes, Slurm and plain shells, never applied."""
