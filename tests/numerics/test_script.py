"""Design 2.2: three changed lines in a script. Real processes: without them, with them alone, and on a cluster.

The script draws from torch's global generator (shuffling, dropout) and loads with worker processes, so anything that
paceline drew for itself, or forked too late, would show.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline  # 1


def digest(model):
    seen = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        seen.update(name.encode() + value.numpy().tobytes())
    return seen.hexdigest()


def main():
    ctx = paceline.init()  # 2
    torch.manual_seed(7)
    x = torch.randn(60, 11)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(11, 31), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(31), nn.Linear(31, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    forking = DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
    model, optimizer, scheduler, loader, forking = ctx.prepare(model, optimizer, scheduler, loader, forking)  # 3
    for name, each in (("plain", loader), ("again", loader), ("forking", forking), ("last", loader)):
        for images, labels in each:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        print("weights after", name, digest(model), flush=True)
    print("next random number", torch.rand(()).item(), flush=True)


if __name__ == "__main__":
    main()
"""


def start(folder: Path, *command: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    environ = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "PACELINE_TASK", "PACELINE_SECRET")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning", "CI": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def told(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("weights after", "next random number"))]


@pytest.mark.timeout(120)
def test_three_changed_lines_alone_and_on_a_cluster(tmp_path: Path) -> None:
    original = "".join(
        line for line in SCRIPT.splitlines(keepends=True) if "paceline" not in line and "ctx" not in line
    )
    assert len(SCRIPT.splitlines()) - len(original.splitlines()) == 3
    (tmp_path / "original.py").write_text(original)
    (tmp_path / "train.py").write_text(SCRIPT)
    run_dir = tmp_path / "run"
    flags = ["--ps", "1", "--workers", "1", "--run-dir", str(run_dir)]
    processes = [
        start(tmp_path / "a", str(tmp_path / "original.py")),
        start(tmp_path / "b", str(tmp_path / "train.py")),
        start(tmp_path / "c", "-m", "paceline", "run", *flags, str(tmp_path / "train.py")),
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    want, alone = told(outputs[0]), told(outputs[1])
    cluster = told((run_dir / "logs" / "worker-0.log").read_text())
    assert len(want) == 5
    assert alone == want
    assert cluster == want
