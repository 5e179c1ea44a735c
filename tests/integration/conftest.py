"""The fixtures of tests on real processes."""

from process_fixtures import gate, ports, processes, train, verified_launch

__all__ = ["gate", "ports", "processes", "train", "verified_launch"]
