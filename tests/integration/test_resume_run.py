"""What `--resume` does for its user: a request that cannot be met is refused before anything starts, with exit code 2,
and what is resumed stands on the terminal.
"""

import json
import shutil
from pathlib import Path

import pytest
from processes import Process, Processes

from paceline.checkpoint.read import find, load

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import sys, torch, paceline
ctx = paceline.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, int(sys.argv[2]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)
for epoch in ctx.epochs(int(sys.argv[1])):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    ctx.save()
"""
FLAGS = ("--ps=1", "--workers=1", "--mode=sync")


class Folder:
    """A folder in which runs are started."""

    def __init__(self, path: Path, processes: Processes) -> None:
        self.path, self._processes = path, processes
        (path / "tiny.py").write_text(SCRIPT)

    def run(self, epochs: int, *flags: str, outputs: int = 2) -> Process:
        words = ("run", *FLAGS, *flags, "tiny.py", str(epochs), str(outputs))
        return self._processes.paceline(*words, cwd=self.path)

    def steps(self, run: str) -> int:
        return int(json.loads((self.path / run / "summary.json").read_text())["global_step"])

    def copy(self, run: str, name: str) -> list[Path]:
        """The run under another name, and its checkpoints, the newest first."""
        shutil.copytree(self.path / run, self.path / name)
        return [found.path for found in find(self.path / name / "checkpoints")]


@pytest.fixture
def folder(tmp_path: Path, processes: Processes) -> Folder:
    return Folder(tmp_path, processes)


def flip(path: Path) -> None:
    """Another byte, of the same number: sizes tell nothing."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_what_cannot_be_resumed_is_refused_before_anything_starts(folder: Folder) -> None:
    folder.run(2, "--run-dir=first").ends_with(0)
    newest = folder.copy("first", "damaged")[0]
    flip(newest / "model.safetensors")
    cut = folder.copy("first", "cut")[0]
    (cut / "optimizer.safetensors").write_bytes(b"")
    for name, damage in (("all", flip), ("none", lambda path: (path.parent / "MANIFEST.json").unlink(missing_ok=True))):
        for path in folder.copy("first", name):
            damage(path / "state.json")
    (folder.path / "file").write_text("no checkpoint")
    (folder.path / "empty").mkdir()
    cases: dict[str, tuple[str, ...]] = {
        f"--resume={newest}": ("model.safetensors", "the hash differs"),
        f"--resume={cut}": ("optimizer.safetensors: it has 0 bytes",),
        "--resume=nowhere": ("there is no such folder",),
        "--resume=file": ("there is no such folder",),
        "--resume=empty": ("there is no whole checkpoint in empty",),
        "--resume=": ("there is no such folder",),
        "--resume=all": ("all 2 are damaged", "state.json", "the hash differs"),
        "--resume=none/checkpoints": ("all 2 are damaged", "MANIFEST.json: it is missing"),
        "--resume=auto --run-dir=all": ("all 2 are damaged", "Choose another --run-dir to start anew"),
    }
    there = sorted(folder.path.rglob("*"))
    for words, sentences in cases.items():
        for more in ((), ("--dry-run",)):
            told = folder.run(3, *words.split(), *more).ends_with(2)
            assert len(told.lines) == 1 and told.text.startswith("paceline: --resume"), told.text
            assert [each for each in sentences if each not in told.text] == [], told.text
    assert sorted(folder.path.rglob("*")) == there, "nothing was made"


@pytest.mark.slow
def test_what_is_resumed_and_what_is_left_out_stands_on_the_terminal(folder: Folder) -> None:
    folder.run(2, "--run-dir=first").ends_with(0)
    newest, older = folder.copy("first", "damaged")
    flip(newest / "model.safetensors")
    step = load(older).state.global_step
    assert (load(folder.copy("first", "whole")[0]).state.global_step, step) == (12, 6)
    for words in ("--resume=auto --run-dir=damaged", "--resume=whole --run-dir=second"):
        told = folder.run(3, *words.split()).ends_with(0)
        is_damaged = "damaged" in words
        begin = f"damaged/checkpoints/step-{step:08}" if is_damaged else "whole/checkpoints/step-00000012"
        assert f"Resuming from {begin}: global step {step if is_damaged else 12}" in told.lines, told.text
        left_out = [line for line in told.lines if "is damaged and left out: model.safetensors" in line]
        assert len(left_out) == is_damaged
        assert folder.steps("damaged" if is_damaged else "second") == 18
    told = folder.run(1, "--run-dir=new", "--resume=auto").ends_with(0)
    assert "Nothing to resume in new: training starts at step 0" in told.text
    assert folder.steps("new") == 6


@pytest.mark.slow
def test_a_checkpoint_of_another_model_ends_the_run_with_exit_code_2(folder: Folder) -> None:
    """Only the script knows its model, so its tasks have started; none is started again, and nothing is trained."""
    folder.run(1, "--run-dir=first").ends_with(0)
    told = folder.run(1, "--run-dir=second", "--resume=first", outputs=3).ends_with(2)
    assert "is of another model" in told.text and "here float32[3, 4], in the checkpoint float32[2, 4]" in told.text
    assert "starting it again" not in told.text
    assert folder.steps("second") == 0
    assert not list((folder.path / "second" / "checkpoints").glob("step-*"))
    whole = "first/checkpoints/step-00000006"  # nothing else was saved: with --resume auto training would begin anew
    start_over = f"To start over, once that is put right: paceline run --resume {whole} --ps 1 --workers 1 "
    assert told.lines[-1].startswith(start_over), told.text
    assert f" --resume {whole} " in json.loads((folder.path / "second" / "summary.json").read_text())["resume"]


def test_a_chief_that_is_started_again_never_begins_anew(folder: Folder) -> None:
    """Its checkpoint is damaged between the launcher's look and its own."""
    folder.run(1, "--run-dir=first").ends_with(0)
    newest = folder.copy("first", "other")[0]
    script = folder.path / "tiny.py"
    damage = f"p = {str(newest / 'model.safetensors')!r}; b = open(p, 'rb').read(); open(p, 'wb').write(b[:-1] + b'?')"
    script.write_text(f"{damage}\n{SCRIPT}")
    told = folder.run(2, "--run-dir=second", f"--resume={newest}").ends_with(2)
    assert "model.safetensors: its bytes are not what was written" in told.text
    assert "starting it again" not in told.text
    assert folder.steps("second") == 0


def test_a_plain_range_is_refused_by_the_launcher_until_it_is_changed(folder: Folder) -> None:
    """The last line of a run says what to change; done so, the command beside it does what remains."""
    script = folder.path / "tiny.py"
    loop = "for epoch in range(int(sys.argv[1])):"
    plain = SCRIPT.replace("for epoch in ctx.epochs(int(sys.argv[1])):", loop)
    assert plain != SCRIPT
    script.write_text(plain)
    change = (
        f"write `for epoch in ctx.epochs(int(sys.argv[1])):` instead of `{loop}` "
        f"(tiny.py, line {plain.splitlines().index(loop) + 1})"
    )
    first = folder.run(2, "--run-dir=first").ends_with(0)
    assert first.lines[-1].startswith(f"To train further (more epochs or steps), {change}, then: paceline run ")
    there = sorted(folder.path.rglob("*"))
    for words in ("--resume=auto --run-dir=first", "--resume=first --run-dir=second"):
        told = folder.run(3, *words.split()).ends_with(2)
        assert len(told.lines) == 1 and change in told.text and "after global step 12 " in told.text
    assert sorted(folder.path.rglob("*")) == there, "nothing was made"
    script.write_text(f"{SCRIPT}\n    assert epoch == 2, 'what was done is not done again'\n")
    folder.run(3, "--resume=auto", "--run-dir=first").ends_with(0)
    assert folder.steps("first") == 18
