"""Messages name the line of the user's script, also where a library has called us, and refuse what a library wraps."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.worker.script import script_line


@pytest.fixture
def file_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function in a module of that folder and name, which calls another in its line 3."""

    def made(folder: str, name: str, called: Any) -> Any:
        path = tmp_path / folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\ndef call(called):\n    return called()\n")
        monkeypatch.syspath_prepend(path.parent)
        return partial(import_module(name).call, called)  # no frame of this file

    yield made
    for name in [n for n in sys.modules if n.startswith("paceline_test_")]:
        del sys.modules[name]


def test_a_library_between_the_script_and_us_is_passed_over(file_of: Any) -> None:
    library = file_of("site-packages", "paceline_test_library", script_line)
    assert file_of(".", "paceline_test_script", library)() == " (paceline_test_script.py, line 3)"


def test_of_an_installed_program_the_line_next_to_us_is_named(file_of: Any) -> None:
    inner = file_of("site-packages", "paceline_test_inner", script_line)
    outer = file_of("site-packages", "paceline_test_outer", inner)
    with ThreadPoolExecutor(1) as pool:  # below it are Python's own files only
        assert pool.submit(outer).result() == " (paceline_test_inner.py, line 3)"
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
