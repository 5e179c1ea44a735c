"""Prose does not drift: links lead somewhere, the map is the tree, code blocks run, docstring examples hold."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PREAMBLE = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8).long()), 4)
loss_fn = torch.nn.functional.cross_entropy
before = model.weight.clone()
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_source_files_that_pages_name_exist(page: Path) -> None:
    for name in re.findall(r"`(?:src/paceline/)?((?:\w+/)+\w+\.py)`", page.read_text()):
        assert (ROOT / "src" / "paceline" / name).exists() or (ROOT / name).exists(), f"{page.name} names {name}"


def test_readme_is_short_and_its_map_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    block = re.search(r"```\nsrc/paceline/\n(.*?)```", text, re.DOTALL)
    assert block
    named = set(re.findall(r"(\w+)/", block.group(1)))
    folders = {p.name for p in (ROOT / "src" / "paceline").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert named == folders


def test_readme_python_block_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "train.py"
    script.write_text(PREAMBLE + blocks[0] + "\nassert not torch.equal(before, model.weight)\nprint('trained')\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "trained", done.stderr


def test_readme_commands_are_understood() -> None:
    """Every `paceline run …` line of the README passes the command line's own checks, up to the missing script."""
    from paceline.cli.main import main

    lines = re.findall(r"`(paceline run [^`]+)`", (ROOT / "README.md").read_text())
    assert lines
    for line in lines:
        with pytest.raises(SystemExit) as ended:
            main([*line.split()[1:-1], "--dry-run", str(ROOT / "src/paceline/launchers/demos/mnist.py")])
        assert ended.value.code == 0, line


def modules() -> list[str]:
    found = pkgutil.walk_packages(paceline.__path__, "paceline.")
    return sorted(m.name for m in found if not m.name.endswith("__main__") and ".demos." not in m.name)


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_hold(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0, capsys.readouterr().out


def test_public_names_exist() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert list(paceline.__all__) == sorted(paceline.__all__)
