"""Messages name the line of the user's script, also where a library has called us, and refuse what a library wraps."""

from concurrent.futures import ThreadPoolExecutor
from types import CodeType
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.worker.script import script_line


def called_from(path: str, module: str, called: Any) -> Any:
    """A function of that file, which calls another in its line 3."""
    code: CodeType = compile("\ndef call():\n    return called()\n", path, "exec")
    names = {"__name__": module, "called": called}
    exec(code, names)
    return names["call"]


def test_a_library_between_the_script_and_us_is_passed_over() -> None:
    library = called_from(
        "/venv/lib/python3/site-packages/accelerate/optimizer.py", "accelerate.optimizer", script_line
    )
    assert called_from("/home/me/train.py", "__main__", library)() == " (train.py, line 3)"


def test_of_an_installed_program_the_line_next_to_us_is_named() -> None:
    inner = called_from("/venv/site-packages/program/loop.py", "program.loop", script_line)
    outer = called_from("/venv/site-packages/program/main.py", "program.main", inner)
    with ThreadPoolExecutor(1) as pool:  # below it are Python's own files only
        assert pool.submit(outer).result() == " (loop.py, line 3)"
        assert pool.submit(script_line).result() == ""


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its class, without the state of one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize("workers", [0, 1])
def test_an_optimizer_that_a_library_has_wrapped_is_refused(workers: int) -> None:
    model = torch.nn.Linear(2, 1)
    wrapped = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    said = r"a Wrapper that wraps an SGD \(test_script_line.py, line \d+\): call ctx.prepare\(\)"
    if workers:
        with pytest.raises(Exception, match=said):
            paceline.launch(lambda ctx: ctx.prepare(model, wrapped), workers=1)
    else:
        with pytest.raises(UsageError, match=said):
            paceline.init().prepare(model, wrapped)
