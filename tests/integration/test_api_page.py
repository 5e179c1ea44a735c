"""Hold docs/api.md to the public names, and run the examples of its two chapters as the two scripts that they are."""

import re
import sys
from pathlib import Path

import msgspec
import pytest
from processes import BIN, Processes

import paceline
from paceline import errors

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
CONTEXT, PACKAGE = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
MOST = 26  # names that a Context shows


def sections(chapter: str) -> dict[str, str]:
    """Each name of a chapter, and what is said of it."""
    _, *parts = re.split(r"^### ", chapter, flags=re.MULTILINE)
    return {name.replace("\\", ""): text for name, text in (part.split("\n", 1) for part in parts)}


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def names_of(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


def test_the_context_shows_what_the_page_has_and_no_more() -> None:
    """Also one that is live: what prepare and a step put into an instance would show."""
    live = []

    def train(ctx: paceline.Context) -> None:
        import torch

        model = torch.nn.Linear(2, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        live.extend(names_of(ctx))

    paceline.launch(train, workers=1, save_every="none")
    told = sorted(name.removeprefix("ctx.") for name in sections(CONTEXT))
    assert len(told) <= MOST
    assert names_of(paceline.Context) == live == told


def test_the_page_has_every_name_of_the_package() -> None:
    assert sorted(sections(PACKAGE)) == sorted(f"paceline.{name}" for name in paceline.__all__)


def test_the_page_has_every_error_and_its_exit_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d) \|$", PACKAGE, re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not errors.PacelineError]
    assert dict(rows) == {kind.__name__: str(kind.exit_code) for kind in kinds}


def test_each_name_has_a_sentence_and_an_example_with_it() -> None:
    for name, text in {**sections(CONTEXT), **sections(PACKAGE)}.items():
        said = text.partition("```")[0].strip()
        assert said.endswith(".") and "\n\n" not in said, name
        assert any(re.search(rf"(?<![\w.]){re.escape(name)}\b", example) for example in examples(text)), name


@pytest.mark.parametrize("is_alone", [False, True], ids=["cluster", "alone"])
def test_the_examples_of_the_context_run(processes: Processes, is_alone: bool) -> None:
    script = processes.folder / "train.py"
    script.write_text("\n".join(examples(CONTEXT)) + "\nprint('through')\n")
    if is_alone:
        assert processes.start(sys.executable, script).ends_with(0).lines[-1] == "through"
        return
    flags = ("--ps", 1, "--workers", 2, "--ema", 0.9, "--run-dir", processes.folder / "run")
    processes.start(BIN / "paceline", "run", *flags, script).ends_with(0)
    told = msgspec.json.decode((processes.folder / "run" / "summary.json").read_bytes())
    assert told["ok"] and told["global_step"] == 40 and "loss" in told["metrics"]
    assert [change["mode"] for change in told["modes"]] == ["sync"]


def test_the_examples_of_the_package_run(processes: Processes) -> None:
    script = processes.folder / "script.py"
    script.write_text("\n".join(examples(PACKAGE)) + "\nprint('through')\n")
    told = processes.start(sys.executable, script).ends_with(0)
    assert told.lines[-1] == "through"
    assert any("the script has failed: worker:0 failed: ValueError" in line for line in told.lines)
