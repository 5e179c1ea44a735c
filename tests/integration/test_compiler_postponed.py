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


def test_once_it_is_imported_everything_is_as_torch_has_it() -> None:
    run(
        POSTPONED
        + STEP
        + "def hook(*_): return 7\n"
        + "before = c.disabled(hook)\n"
        + "assert before() == 7 and c.COMPILER not in sys.modules\n"
        + "torch.compile(model, backend='eager')\n"
        + "assert c.COMPILER in sys.modules and c.watch() is None\n"
        + "assert not [m for m in c.methods() if hasattr(m, c.KEPT)], 'torch wraps them at their next call'\n"
        + "assert before() == 7 and getattr(before.__wrapped__, c.KEPT)._torchdynamo_disable\n"
        + "optimizer.zero_grad()\n"
        + "kept = [getattr(m, c.KEPT, None) for m in c.methods() if m.__name__ == 'zero_grad']\n"
        + "assert kept[0]._torchdynamo_disable\n"
        + "assert c.disabled(hook)._torchdynamo_orig_callable is hook\n"
        + "assert not c.postpone(), 'too late'"
    )


@pytest.mark.slow
@pytest.mark.parametrize("change", ["c.KEPT = '__other'", "torch.optim.Optimizer.add_param_group = lambda *_: None"])
def test_a_torch_that_keeps_it_elsewhere_is_left_alone(change: str) -> None:
    run(BEGIN + change + "\nassert not c.postpone() and c.watch() is None")


COMPILED = """
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        return self.last(x)

model = Small()
def noted(module, inputs):  # what a compiler that looks at it refuses
    seen.append(1)
    print("called", flush=True)
seen = []
model.register_forward_pre_hook(c.disabled(noted))
x = torch.ones(3, 2)
plain = model(x)
compiled = torch.compile(model, backend="eager", fullgraph=True)
assert torch.equal(compiled(x), plain) and torch.equal(compiled(x), plain)
assert len(seen) == 3, seen
"""


@pytest.mark.slow
def test_a_whole_graph_is_compiled_around_a_hook_that_was_there_before() -> None:
    run(POSTPONED + COMPILED)
