"""Prose does not drift: links lead somewhere, the map is the tree, code blocks run, docstring examples hold."""

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.main import main
from paceline.modes import MODES
from paceline.wire.frames import Flag, Kind, Outcome

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
SCRIPT = str(ROOT / "src/paceline/launchers/demos/mnist.py")
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
PREAMBLE = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8).long()), 4)
loss_fn = torch.nn.functional.cross_entropy
before = model.weight.clone()
"""


SERVED = """
import socket
import torch
from torch import nn
import paceline
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
cluster = paceline.ClusterSpec({"worker": ["127.0.0.1:%d" % each.getsockname()[1] for each in held]})
for each in held:
    each.close()
servers = [paceline.Server(cluster, "worker", index) for index in range(2)]
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
part = model[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch, values = (torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)), [1, 2, 3]
loss_fn = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
@paceline.op
def mean(values):
    return sum(values) / len(values)
"""


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_source_files_that_pages_name_exist() -> None:
    for page in PAGES:
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


def test_readme_python_blocks_run(tmp_path: Path) -> None:
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for number, text in enumerate(
        (
            PREAMBLE + first + "\nassert not torch.equal(before, model.weight)\nprint('trained')\n",
            SERVED
            + second
            + "\nassert part(batch[0]).shape == (8, 3) and total == 2.0 and loss > 0\nprint('trained')\n",
        )
    ):
        script = tmp_path / f"train_{number}.py"
        script.write_text(text)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        assert done.stdout.splitlines()[-1:] == ["trained"], done.stderr


def test_readme_commands_are_understood() -> None:
    """Every `paceline run …` line of the README passes the command line's own checks, up to the missing script."""
    lines = re.findall(r"`(paceline run [^`]+)`", (ROOT / "README.md").read_text())
    assert lines
    for line in lines:
        with pytest.raises(SystemExit) as ended:
            main([*line.split()[1:-1], "--dry-run", SCRIPT])
        assert ended.value.code == 0, line


# --- modes.md and its pictures ----------------------------------------------------------------------------------------


def modes_page() -> str:
    return (ROOT / "docs" / "modes.md").read_text()


def blocks(language: str) -> list[str]:
    """The code blocks of modes.md in this language; "" for those that name none."""
    every = re.findall(r"^```(\w*)\n(.*?)^```$", modes_page(), re.DOTALL | re.MULTILINE)
    return [code for named, code in every if named == language]


def test_pictures_are_what_the_deciding_code_does(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PICTURES / "draw.py", tmp_path], check=True, timeout=120)
    drawn = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert drawn == {p.name: p.read_bytes() for p in PICTURES.glob("*.svg")}, "run `make pictures` and look at them"


def test_every_picture_is_shown_and_can_be_read() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(pictures/(\S+)\)", modes_page())
    assert sorted(shown) == sorted(p.name for p in PICTURES.glob("*.svg"))
    for name in shown:
        root = ElementTree.parse(PICTURES / name).getroot()
        said = [text for text in root.iter() if text.tag.endswith("}text")]
        assert (root.get("width"), root[0].text) == ("900", said[0].text), "its caption is its title"
        for text in said:
            width = 0.62 * float(text.get("font-size", 0)) * len(text.text or "")
            end = float(text.get("x", 0)) + width / (2 if text.get("text-anchor") else 1)
            assert end < 900, f"{name}: {text.text!r} is cut off"


def test_every_mode_has_its_section() -> None:
    """A title, four lines of pseudo-code and a picture each; who waits, when to use it, which flags, which summary."""
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## )", modes_page(), re.DOTALL | re.MULTILINE))
    for mode in MODES:
        text = sections[mode]
        code = re.search(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert code and len(code.group(1).splitlines()) == 4, mode
        assert "](pictures/" in text, mode
        for part in ("**Who waits:**", "**When:**", "**Flags:**", "**Summary:**"):
            assert part in text, f"{mode} lacks {part}"


OTHERS = {  # of mypy, kubectl, Slurm, torchrun and Ray
    "--strict", "--from-file", "--cpus-per-task", "--distribution", "--het-group", "--label", "--ntasks", "--output",
    "--pty", "--nproc-per-node", "--standalone", "--working-dir", "--address",
}  # fmt: skip


def test_flags_that_pages_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = set()
    verbs = ("run", "serve", "ctl mode", "lab run", "emit docker", "emit jobset", "emit env", "env", "plan", "doctor")
    for verb in verbs:
        with pytest.raises(SystemExit):
            main([*verb.split(), "--help"])
        known |= flags_in(capsys.readouterr().out)
    for example in (ROOT / "examples").glob("*.py"):  # their own
        known |= flags_in(example.read_text())
    for page in PAGES:
        unknown = flags_in(page.read_text()) - known - OTHERS
        assert not unknown, f"{page.name} names {sorted(unknown)}"


def flags_in(text: str) -> set[str]:
    return {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)}


def test_commands_of_modes_are_understood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Up to the missing script, or the missing run."""
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("paceline ")]
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(line)[1:]
        is_run = words[0] == "run"
        with pytest.raises(SystemExit) as ended:
            main([*words[:-1], "--dry-run", SCRIPT] if is_run else words)
        told = capsys.readouterr().err
        assert ended.value.code == (0 if is_run else 2), line
        assert is_run or told.startswith("paceline: No run folder 'latest', and none of that name under runs/"), line


def test_python_of_modes_runs() -> None:
    """One after the other, on two workers of a run with averages, with steps between them."""
    codes = [code for code in blocks("python") if "paceline.init" not in code]
    assert len(codes) == 3
    modes = []

    def train(ctx: paceline.Context) -> None:
        import torch

        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ctx.prepare(model, optimizer)
        known = {"ctx": ctx, "model": model, "evaluate": lambda model: float(model.weight.detach().sum())}
        for code in [*codes, ""]:
            exec(code, known)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        modes.append(ctx.mode)

    told = paceline.launch(train, mode="async", ema=0.9)
    assert told["ok"] and "averaged_accuracy" in told["metrics"]
    assert modes == ["sync", "sync"]
    assert [change["mode"] for change in told["modes"]] == ["sync, 2 to aggregate"]


def test_clipped_weights_of_modes_are_plain_pytorch() -> None:
    """The Wasserstein GAN of the page, on a ps; and the same program that clamps by hand."""
    import torch

    (code,) = [code for code in blocks("python") if "paceline.init" in code]
    code = code.replace("ctx = paceline.init()\n", "")
    found = []

    def train(ctx: object, text: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        known: dict[str, Any] = {"ctx": ctx}
        exec(text, known)
        found.append({name: value.clone() for name, value in known["model"].state_dict().items()})

    by_hand = re.sub(r"^(paceline\.constrain|model, optimizer = ctx).*\n", "", code, flags=re.MULTILINE)
    by_hand += "    for p in critic.parameters():\n        p.data.clamp_(-0.01, 0.01)\n"
    threads = torch.get_num_threads()
    train(None, by_hand)
    torch.set_num_threads(threads)
    paceline.launch(lambda ctx: train(ctx, code), ps=2, workers=1, save_every="none")
    want, got = found
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert float(got["critic.0.weight"].abs().max()) <= 0.01


@pytest.mark.parametrize("words", [Kind, Flag, Outcome], ids=lambda e: e.__name__)
def test_protocol_names_every_word_of_a_frame(words: type[Kind | Flag | Outcome]) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    (table,) = re.findall(rf"^\| {words.__name__.lower()} \|.*?\n\|[-|]+\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    named = [name for row in table.splitlines() for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(word.name for word in words)


def test_protocol_names_every_message_of_a_switch() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    for name in ("SwitchMode", "Ready", "Dial", "Align", "Aligned", "Switched", "Started"):
        assert f"`{name}`" in text, name


def modules() -> list[str]:
    found = pkgutil.walk_packages(paceline.__path__, "paceline.")
    names = [m.name for m in found if not m.name.endswith("__main__") and ".demos." not in m.name]
    return sorted(name for name in names if not name.startswith("paceline.frameworks.keras"))  # they need the extra


def test_docstring_examples_hold(capsys: pytest.CaptureFixture[str]) -> None:
    found = [importlib.import_module(name) for name in modules()]
    with_examples = [each for each in found if ">>> " in Path(str(each.__file__)).read_text()]
    results = [doctest.testmod(each) for each in with_examples]
    assert sum(result.failed for result in results) == 0, capsys.readouterr().out
    assert sum(result.attempted for result in results) > 300


def test_public_names_exist() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert list(paceline.__all__) == sorted(paceline.__all__)
