"""Messages name the line of the user's script, also where a library has called us, and refuse what a library wraps."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.worker.script import script_line


def called_from(path: Path, called: Any) -> Any:
    """A function in that file, which calls another in its line 3."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\ndef call(called):\n    return called()\n")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return partial(module.call, called)  # no frame of this file


def test_a_library_between_the_script_and_us_is_passed_over(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "accelerate" / "optimizer.py"
    script = called_from(tmp_path / "train.py", called_from(library, script_line))
    assert script_line().startswith(" (test_script_line.py")
    assert script() == " (train.py, line 3)"


def test_of_an_installed_program_the_line_next_to_us_is_named(tmp_path: Path) -> None:
    program = tmp_path / "site-packages" / "program"
    inner = called_from(program / "loop.py", script_line)
    outer = called_from(program / "main.py", inner)
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
