"""IS torch's compiler imported only when somebody compiles? Each case is a process of its own: an import stays."""

import subprocess
import sys

import pytest

BEGIN = """
import sys, torch
from torch import nn
from paceline.frameworks.torch import compiler as c
model = nn.Linear(2, 1)
"""
POSTPONED = BEGIN + "assert c.postpone() and c.postpone()\n"
STEP = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\noptimizer.zero_grad()\noptimizer.state_dict()\n"


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_optimizers_do_not_import_it() -> None:
    run(POSTPONED + STEP + "assert c.COMPILER not in sys.modules and c.watch() is not None")


@pytest.mark.slow
def test_once_it_is_imported_everything_is_as_torch_has_it() -> None:
    run(
        POSTPONED
        + STEP
        + "torch.compile(model, backend='eager')\n"
        + "assert c.COMPILER in sys.modules and c.watch() is None\n"
        + "assert not [m for m in c.methods() if hasattr(m, c.KEPT)], 'torch wraps them at their next call'\n"
        + "optimizer.zero_grad()\n"
        + "kept = [getattr(m, c.KEPT, None) for m in c.methods() if m.__name__ == 'zero_grad']\n"
        + "assert kept[0]._torchdynamo_disable\n"
        + "assert not c.postpone(), 'too late'"
    )


@pytest.mark.slow
@pytest.mark.parametrize("change", ["c.KEPT = '__other'", "torch.optim.Optimizer.add_param_group = lambda *_: None"])
def test_a_torch_that_keeps_it_elsewhere_is_left_alone(change: str) -> None:
    run(BEGIN + change + "\nassert not c.postpone() and c.watch() is None")
