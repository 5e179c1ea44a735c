"""Whatever loop a script has, a resume does what remains, or is refused with the line to change; no pass is empty."""

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import FileHash
from paceline.checkpoint.read import load_newest
from paceline.errors import TrainingFailed, UsageError

pytestmark = pytest.mark.timeout(180)

BATCHES = 4
Work = Callable[[Any, Any, "Script"], None]


class Stopped(Exception):
    pass


class Numbers(IterableDataset[torch.Tensor]):
    """Its loader does not know how many batches it gives."""

    def __iter__(self) -> Any:
        return iter(torch.arange(float(2 * BATCHES)).reshape(-1, 1))


class Script:
    """One start of a script: what it pushed, a list a pass, and where it is stopped."""

    def __init__(self, stop_at: int = -1, is_streamed: bool = False) -> None:
        self.seen: list[list[int]] = []
        self.stop_at = stop_at
        self.is_streamed = is_streamed

    def start(self, work: Work, folder: Path, **options: Any) -> int:
        told = paceline.launch(lambda ctx: self._work(ctx, work), workers=1, run_dir=str(folder), **options)
        return int(told["global_step"])

    def _work(self, ctx: Any, work: Work) -> None:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = Numbers() if self.is_streamed else torch.arange(float(2 * BATCHES)).reshape(-1, 1)
        loader = DataLoader(data, batch_size=2, shuffle=None if self.is_streamed else True)  # type: ignore[arg-type]
        self.model, self.optimizer, loader = ctx.prepare(model, optimizer, loader)
        self.ctx = ctx
        work(ctx, loader, self)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).sum().backward()
        self.optimizer.step()
        self.seen[-1] += [int(number) for number in batch.flatten()]
        if sum(map(len, self.seen)) == 2 * self.stop_at:
            self.ctx.save()
            raise Stopped

    def one_pass(self, loader: Any) -> None:
        self.seen.append([])
        batch = None
        for batch in loader:
            self.step(batch)
        assert batch is not None, "a pass without a batch"


def by_range(ctx: Any, loader: Any, script: Script) -> None:
    for _epoch in range(3):
        script.one_pass(loader)


def by_progress_bar(ctx: Any, loader: Any, script: Script) -> None:
    for _epoch in zip(range(3), itertools.count(), strict=False):
        script.one_pass(loader)


def by_while(ctx: Any, loader: Any, script: Script) -> None:
    epoch = 0
    while epoch < 3:
        script.one_pass(loader)
        epoch += 1


def stream(loader: Any, script: Script) -> Any:
    while True:
        script.seen.append([])
        yield from loader


def by_steps_of_its_own(ctx: Any, loader: Any, script: Script) -> None:
    batches = stream(loader, script)
    for _ in range(12):
        script.step(next(batches))


def without_a_loader(ctx: Any, loader: Any, script: Script) -> None:
    for step in range(12):
        script.seen.append([])
        script.step(torch.ones(2, 1) * step)


def on_one_line(ctx: Any, loader: Any, script: Script) -> None:
    for _ in range(3): script.one_pass(loader)  # fmt: skip # noqa: E701


def by_epochs(ctx: Any, loader: Any, script: Script) -> None:
    for _ in ctx.epochs(3):
        script.one_pass(loader)


def by_steps(ctx: Any, loader: Any, script: Script) -> None:
    batches = stream(loader, script)
    for _ in ctx.steps(12):
        script.step(next(batches))


def by_steps_beside_batches(ctx: Any, loader: Any, script: Script) -> None:
    """The pass begins before ctx.steps does."""
    script.seen.append([])
    for batch, _ in zip(itertools.chain(loader, loader, loader, loader), ctx.steps(12), strict=False):
        script.step(batch)


def by_global_step(ctx: Any, loader: Any, script: Script) -> None:
    while ctx.global_step < 12:
        script.one_pass(loader)


def until_global_step(ctx: Any, loader: Any, script: Script) -> None:
    for _ in itertools.count():
        script.one_pass(loader)
        if ctx.global_step >= 12:
            break


def from_global_step(ctx: Any, loader: Any, script: Script) -> None:
    remaining = range(ctx.global_step, 12)
    batches = stream(loader, script)
    for _ in remaining:
        script.step(next(batches))


def from_where_it_says(ctx: Any, loader: Any, script: Script) -> None:
    done = int(getattr(ctx._session.resumed_from, "name", "step-0").removeprefix("step-"))
    batches = stream(loader, script)
    for _ in range(done, 12):
        script.step(next(batches))


def from_an_epoch_that_is_0(ctx: Any, loader: Any, script: Script) -> None:
    start_epoch = 0
    for _epoch in range(start_epoch, 3):
        script.one_pass(loader)


def from_epoch_1(ctx: Any, loader: Any, script: Script) -> None:
    for _epoch in range(1, BATCHES - 1 + 1):
        script.one_pass(loader)


def one_pass(ctx: Any, loader: Any, script: Script) -> None:
    script.one_pass(loader)


BEGIN_AGAIN = {
    by_range: "write `for _epoch in ctx.epochs(3):` instead of `for _epoch in range(3):` (test_resume_loops.py, line ",
    by_progress_bar: "write `for epoch in ctx.epochs(n):` instead of `for _epoch in zip(range(3)",
    by_while: "`for epoch in ctx.epochs(n):` or `while ctx.global_step < total:` instead of `while epoch < 3:`",
    by_steps_of_its_own: "instead of `for _ in range(12):`",
    from_an_epoch_that_is_0: "`for _epoch in ctx.epochs(3):` instead of `for _epoch in range(start_epoch, 3):`",
    from_epoch_1: "`for _epoch in ctx.epochs(BATCHES - 1):` instead of `for _epoch in range(1, BATCHES - 1 + 1):`",
    without_a_loader: "write `for _ in ctx.steps(total):` instead of `for step in range(12):`",
    on_one_line: "`for _ in ctx.epochs(3):` instead of `for _ in range(3): script.one_pass(loader)",
}
GO_ON = (by_epochs, by_steps, by_steps_beside_batches, by_global_step, until_global_step, from_global_step)
GO_ON += (from_where_it_says,)


def flat(*scripts: Script) -> list[int]:
    return [number for script in scripts for each in script.seen for number in each]


@pytest.mark.parametrize("stop_at", [6, 8, 12])
def test_a_loop_that_begins_again_is_refused(stop_at: int, tmp_path: Path) -> None:
    """In the middle of a pass, at its end, and when all is done; nothing is trained, and nothing is written."""
    for number, (work, sentence) in enumerate(BEGIN_AGAIN.items()):
        folder = tmp_path / str(number)
        if stop_at == 12:
            assert Script().start(work, folder) == 12
        else:
            with pytest.raises(TrainingFailed, match="Stopped"):
                Script(stop_at).start(work, folder)
        before = load_newest(folder / "checkpoints")
        assert before is not None and before.state.global_step == stop_at
        again = Script()
        with pytest.raises(TrainingFailed) as error:
            again.start(work, folder, resume="auto")
        assert isinstance(error.value.__cause__, UsageError)
        assert sentence in str(error.value.__cause__), work
        assert f"after global step {stop_at} " in str(error.value.__cause__)
        after = load_newest(folder / "checkpoints")
        assert after is not None and after.path == before.path, "nothing was made"
        assert load_newest(folder / "checkpoints") is not None


@pytest.mark.parametrize("stop_at", [6, 8, 12])
def test_a_loop_that_goes_on_does_what_remains(stop_at: int, tmp_path: Path) -> None:
    whole = Script()
    assert whole.start(by_epochs, tmp_path / "whole") == 12
    works = [work for work in GO_ON if work is not until_global_step or stop_at < 12]  # it asks after each pass
    for number, work in enumerate(works):
        folder, first, again = tmp_path / str(number), Script(stop_at), Script()
        with pytest.raises(TrainingFailed, match="Stopped"):
            first.start(work, folder)
        assert again.start(work, folder, resume="auto") == 12, work
        assert flat(first, again) == flat(whole), work


@pytest.mark.parametrize("is_streamed", [False, True], ids=["list", "stream"])
@pytest.mark.parametrize("stop_at", [6, 8])
def test_a_script_that_was_changed_to_ctx_epochs_goes_on(stop_at: int, is_streamed: bool, tmp_path: Path) -> None:
    """What the refusal asks for is of use for the checkpoint at hand."""
    whole, first, again = Script(), Script(stop_at, is_streamed), Script(is_streamed=is_streamed)
    whole.is_streamed = is_streamed
    assert whole.start(by_epochs, tmp_path / "whole") == 12
    with pytest.raises(TrainingFailed, match="Stopped"):
        first.start(by_range, tmp_path / "parts")
    assert again.start(by_epochs, tmp_path / "parts", resume="auto") == 12
    assert flat(first, again) == flat(whole)


def test_a_script_of_one_pass_goes_on_in_it_and_then_takes_another(tmp_path: Path) -> None:
    first, second, third = Script(3), Script(), Script()
    with pytest.raises(TrainingFailed, match="Stopped"):
        first.start(one_pass, tmp_path)
    assert second.start(one_pass, tmp_path, resume="auto") == 4
    assert third.start(one_pass, tmp_path, resume="auto") == 8
    everything = list(range(2 * BATCHES))
    assert sorted(flat(first, second)) == sorted(flat(third)) == everything


def test_nothing_was_trained_yet(tmp_path: Path) -> None:
    """A checkpoint of step 0: every loop does all of it."""
    Script().start(lambda ctx, loader, script: ctx.save(), tmp_path)
    assert Script().start(by_range, tmp_path, resume="auto") == 12


def test_a_checkpoint_that_does_not_know_its_loop(tmp_path: Path) -> None:
    """Written by an earlier paceline, at the end of a pass: the loop that resumes is looked at."""
    with pytest.raises(TrainingFailed, match="Stopped"):
        Script(8).start(by_range, tmp_path)
    newest = load_newest(tmp_path / "checkpoints")
    assert newest is not None
    state = json.loads((newest.path / "state.json").read_text())
    for worker in state["workers"]:
        assert worker.pop("loop")["kind"] == "for" and worker.pop("done") == 2
    content = json.dumps(state).encode()
    files = {**newest.manifest.files, "state.json": FileHash(len(content), hashlib.sha256(content).hexdigest())}
    (newest.path / "state.json").write_bytes(content)
    made = manifest.made(newest.manifest.global_step, newest.manifest.lineage, files)
    (newest.path / "MANIFEST.json").write_bytes(manifest.encode(made))
    with pytest.raises(TrainingFailed, match=r"write `for _epoch in ctx.epochs\(3\):` instead"):
        Script().start(by_range, tmp_path, resume="auto")
    again = Script()
    assert again.start(by_global_step, tmp_path, resume="auto") == 12
    assert [len(each) for each in again.seen] == [2 * BATCHES]
