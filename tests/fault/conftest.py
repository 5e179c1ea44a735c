"""The fixtures of tests/integration, for the faults."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from process_fixtures import gate, ports, processes, train, verified_launch

__all__ = ["gate", "ports", "processes", "train", "verified_launch"]
