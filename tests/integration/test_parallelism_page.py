"""The code blocks of docs/parallelism.md run as they stand; only the devices are this machine's."""

import re
import sys
from pathlib import Path

import pytest
from processes import Processes

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
PREAMBLE = """
import torch
from torch import nn
import paceline
model = nn.Linear(784, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 784), torch.zeros(8).long()), 4)
def loss_fn(model, images, labels):
    return nn.functional.cross_entropy(model(images), labels)
"""
CHECK = """
images, labels = next(iter(loader))
loss_fn(model, images, labels).backward()
assert all(p.grad is not None for p in model.parameters())
assert two_floors()(images).shape == whole(images).shape
print("ran")
"""


@pytest.mark.slow
def test_the_code_of_the_page_runs(processes: Processes) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    script = processes.folder / "page.py"
    here = [re.sub(r'"/(gpu|job:worker/task):\d"', '"/cpu:0"', block) for block in blocks]
    assert all("/cpu:0" in block and "/job" not in block for block in here)
    script.write_text(PREAMBLE + "".join(here) + CHECK)
    assert processes.start(sys.executable, script, name="page").ends_with(0).lines[-1] == "ran"
