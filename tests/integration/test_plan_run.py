"""DOES a calibration see a real script? Its parts, its failure with the traceback, and nothing left behind."""

from pathlib import Path

import msgspec
import pytest
from processes import Process, Processes

from paceline.cluster.cores import usable_cores
from paceline.plan.costs import Costs

pytestmark = pytest.mark.timeout(150)  # a loaded machine takes long to start tasks

SCRIPT = """
import torch
import paceline

ctx = paceline.init()
model = torch.nn.Linear(50, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(640, 50), torch.randint(0, 10, (640,)))
loader = torch.utils.data.DataLoader(data, batch_size=32)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def plan(processes: Processes, script: Path, *flags: object) -> Process:
    """With all cores for one task there is no crowd: one run calibrates."""
    return processes.paceline("plan", "--seconds", "0.4", "--threads", usable_cores(), *flags, script)


@pytest.mark.slow
def test_a_script_that_never_ends_is_calibrated_and_planned(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(SCRIPT)
    done = plan(processes, script, "--workers", "1:2", "--ps", "1", "--mode", "async", "--out", tmp_path / "out")
    assert "Recommended: " in done.ends_with(0).text
    costs = msgspec.json.decode((tmp_path / "out" / "calibration.json").read_bytes(), type=Costs)
    assert costs.batch == 32 and costs.compute_ms > 0 and costs.apply_ms > 0
    assert 510 * 4 <= costs.size_bytes < 3000 and costs.lanes["shm"].message_ms > 0


def test_a_script_that_fails_is_told_with_its_traceback(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(SCRIPT.replace("optimizer.step()", "optimizer.step(); raise ValueError('no more data')"))
    said = plan(processes, script).ends_with(2).text
    assert "ValueError: no more data" in said and "Traceback" in said
