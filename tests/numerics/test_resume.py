"""Stopped anywhere and resumed with the same workers is the uninterrupted run, bit for bit; with others it goes on."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import assert_same, weights
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.checkpoint.read import load, load_newest
from paceline.errors import TrainingFailed

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from process_fixtures import started_processes

PROGRAM = Path(__file__).with_name("programs") / "resumed.py"


class Stopped(Exception):
    """The script ends here, in the middle."""


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))


def loader_of(count: int = 40) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=numbers)
    return DataLoader(TensorDataset(inputs, inputs[:, :2]), batch_size=4, shuffle=True)


Schedule = Callable[[torch.optim.Optimizer], Any]
Train = Callable[[Any], None]


def training(ended: dict[str, Any], schedule: Schedule, stop_at: int | None = None, by_steps: bool = False) -> Train:
    """40 updates of one worker, by epochs or by steps, with everything that a position must bring back."""

    def train(ctx: Any) -> None:
        torch.set_num_threads(1)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        scheduler = schedule(optimizer)
        model, optimizer, loader, scheduler = ctx.prepare(model, optimizer, loader_of(), scheduler)
        torch.manual_seed(9) if ctx.global_step == 0 else None
        for x, y in stepwise(ctx, loader) if by_steps else epochwise(ctx, loader):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            if ctx.global_step == stop_at:
                until_saved(Path(ctx._session.assignment.settings.run_dir))
                raise Stopped
        ended.update(model=weights(model), slots=optimizer.state_dict(), scheduler=scheduler.state_dict())
        ended["drawn"] = torch.rand(3)

    return train


def until_saved(run_dir: Path) -> None:
    """An earlier step's checkpoint is written meanwhile, by another thread."""
    deadline = time.monotonic() + 30
    while not list((run_dir / "checkpoints").glob("step-*/MANIFEST.json")) and time.monotonic() < deadline:
        time.sleep(0.005)


def epochwise(ctx: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    for _ in ctx.epochs(4):
        yield from loader


def stepwise(ctx: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    def for_ever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = for_ever()
    for _ in ctx.steps(40):
        yield next(batches)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return OneCycleLR(optimizer, 0.05, total_steps=50)


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    return MultiStepLR(optimizer, [7, 15, 22], 0.5)


@pytest.mark.parametrize("by_steps", [False, True], ids=["epochs", "steps"])
@pytest.mark.parametrize("schedule", [one_cycle, milestones])
def test_stopped_in_the_middle_of_an_epoch(schedule: Schedule, by_steps: bool, tmp_path: Path) -> None:
    whole: dict[str, Any] = {}
    again: dict[str, Any] = {}
    options: dict[str, Any] = {"ps": 2, "workers": 1, "mode": "sync", "save_every": "6"}
    paceline.launch(training(whole, schedule, by_steps=by_steps), run_dir=str(tmp_path / "whole"), **options)
    folder = tmp_path / "parts"
    with pytest.raises(TrainingFailed):
        paceline.launch(training({}, schedule, 23, by_steps), run_dir=str(folder), **options)
    newest = load_newest(folder / "checkpoints")
    assert newest is not None and 0 < newest.state.global_step < 23
    told = paceline.launch(training(again, schedule, by_steps=by_steps), run_dir=str(folder), resume="auto", **options)
    assert told["global_step"] == 40
    assert_same(whole, again, "resumed")


def test_a_run_that_was_done_goes_on_when_more_is_asked_of_it(tmp_path: Path) -> None:
    """The last checkpoint says that its epochs are done: nothing is repeated, and more epochs follow."""
    seen: list[tuple[int, int]] = []

    def train(epochs: int) -> Train:
        def work(ctx: Any) -> None:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = ctx.prepare(model, optimizer, loader_of(8))
            for epoch in ctx.epochs(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    mse_loss(model(x), y).backward()
                    optimizer.step()
                    seen.append((epoch, ctx.global_step))

        return work

    for epochs in (2, 2, 3):
        paceline.launch(train(epochs), workers=1, run_dir=str(tmp_path), resume="auto", mode="sync")
    assert seen == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]


def test_another_number_of_ps_and_workers_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    """2 ps and 2 workers, resumed as 1 ps and 3: the same parameters, optimizer state and averages to begin with."""
    begun: list[dict[str, Any]] = []

    def train(steps: int) -> Train:
        def work(ctx: Any) -> None:
            model = net()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            model, optimizer, loader = ctx.prepare(model, optimizer, loader_of())
            if ctx.is_chief:
                with ctx.ema():
                    averages = weights(model)
                begun.append({"model": weights(model), "ema": averages, "slots": optimizer.state_dict()["state"]})
                begun[-1]["step"] = ctx.global_step
            ctx.barrier()
            batches = islice((b for _ in range(99) for b in loader), 99)
            for _ in ctx.steps(steps):
                x, y = next(batches)
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()

        return work

    common = {"mode": "sync", "ema": 0.9, "run_dir": str(tmp_path), "resume": "auto"}
    paceline.launch(train(8), ps=2, workers=2, **common)
    saved = tmp_path / "checkpoints" / "step-00000008"
    paceline.launch(train(12), ps=1, workers=3, **common)
    assert begun[1]["step"] == 8
    assert_same(load_file(saved / "model.safetensors"), begun[1]["model"], "model")
    assert_same(load_file(saved / "ema.safetensors"), begun[1]["ema"], "averages")
    slots = load_file(saved / "optimizer.safetensors")
    for number, name in enumerate(["0.weight", "0.bias", "2.weight", "2.bias"]):
        for slot in ("step", "exp_avg", "exp_avg_sq"):
            assert_same(slots[f"{name}.{slot}"], begun[1]["slots"][number][slot], f"{name}.{slot}")
    assert load(tmp_path / "checkpoints" / "step-00000012").state.num_workers == 3


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_saved_while_others_train_on(mode: str, tmp_path: Path) -> None:
    """1 of 2 workers makes a round: nobody stands still, and yet no checkpoint has two versions. Older ones go."""
    seen: set[str] = set()

    def train(ctx: Any) -> None:
        torch.set_num_threads(1)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader_of())
        for _ in ctx.epochs(1000):
            for x, y in loader:
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
            seen.update(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
            if len(seen) > 2:
                break

    options = {"replicas_to_aggregate": 1} if mode == "sync" else {}
    paceline.launch(train, ps=2, workers=2, mode=mode, run_dir=str(tmp_path), save_every="3", keep=2, **options)
    text = "".join(path.read_text() for path in (tmp_path / "telemetry").glob("worker-*.jsonl"))
    told = [json.loads(line) for line in text.splitlines() if '"pause_ms"' in line and '"write_s"' in line]
    assert len(told) > 2
    assert all(each["bytes"] > 0 and each["pause_ms"] > 0 and each["write_s"] > 0 for each in told)
    left = sorted((tmp_path / "checkpoints").iterdir())
    assert len(left) == 2
    for path in left:
        state = load(path).state
        assert len(state.workers) == 2
        if mode == "sync":
            assert {shard.version for shard in state.shards} == {state.global_step}


@pytest.mark.parametrize("wrong", ["model", "optimizer", "path"])
def test_what_cannot_be_resumed_is_refused_with_the_reason(wrong: str, tmp_path: Path) -> None:
    def train(model: nn.Module, kind: Any) -> Train:
        def work(ctx: Any) -> None:
            prepared, optimizer = ctx.prepare(model, kind(model.parameters(), lr=0.1))
            optimizer.zero_grad()
            prepared(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        return work

    paceline.launch(train(net(), torch.optim.SGD), workers=1, run_dir=str(tmp_path))
    resume, model, kind, reason = str(tmp_path), net(), torch.optim.SGD, ""
    if wrong == "model":
        model, reason = (
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)),
            r"2.weight: here float32\[3, 8\]",
        )
    elif wrong == "optimizer":
        kind, reason = torch.optim.Adam, "written by SGD, and this script's optimizer is Adam"  # type: ignore[assignment]
    else:
        resume, reason = str(tmp_path / "nowhere"), "there is no such folder"
    with pytest.raises(TrainingFailed, match=reason):
        paceline.launch(train(model, kind), workers=1, resume=resume, wait_s=20.0)


CASES = {
    "epochs": ("--ps 1 --mode sync --save-every 5", "", 17),
    "steps, 2 ps": ("--ps 2 --mode sync --save-every 5", "--loop steps --optimizer SGD", 17),
    "accumulation, tcp": ("--ps 2 --mode sync --save-every 3 --lane tcp", "--accumulate 3 --scheduler epoch --norm", 7),
    "averages, half": ("--ps 2 --mode sync --save-every 4 --ema 0.9", "--loop steps --optimizer AdamW --norm", 21),
    "one worker": ("--ps 1 --workers 1 --mode sync --save-every 4", "--accumulate 2 --norm", 21),
    "every loader's order": ("--ps 1 --mode sync --save-every 6 --data full", "--loop steps --steps 60", 40),
}


NIGHTLY = pytest.mark.nightly("a resumed run whose bits depend on its optimizer, loop, lane and ps together")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if at in (1, 2, 5) else NIGHTLY) for at, case in enumerate(CASES)]
)
def test_killed_as_a_whole_and_resumed_is_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    """kill -9 of the launcher takes everybody with it; then `--resume auto` in the same folder."""
    flags, words, die_at = CASES[case]
    flags = flags if "--workers" in flags else f"{flags} --workers 2"
    with started_processes(tmp_path) as processes:
        for out in ("whole", "parts"):
            (tmp_path / out).mkdir()

        def run(run_dir: str, out: str, *more: str, resume: str = "none") -> Any:
            given = ["--out", str(tmp_path / out), *words.split(), *more]
            return processes.paceline("run", "--run-dir", run_dir, "--resume", resume, *flags.split(), PROGRAM, *given)

        run("a", "whole").ends_with(0)
        run("b", "parts", "--die-at", str(die_at), "--run", str(tmp_path / "b")).ends_with(-9)
        found = load_newest(tmp_path / "b" / "checkpoints")
        assert found is not None and found.state.global_step < die_at
        run("b", "parts", resume="auto").ends_with(0)
        log = (tmp_path / "b" / "logs" / "worker-0.log").read_text()
        assert f"global step {found.state.global_step}" in log
    for worker in sorted(path.name for path in (tmp_path / "whole").iterdir()):
        assert (tmp_path / "whole" / worker).read_text() == (tmp_path / "parts" / worker).read_text()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("num_ps", "loop"),
    [
        (1, "--epochs 100"),
        pytest.param(2, "--epochs 100", marks=NIGHTLY),
        pytest.param(1, "--loop steps --steps 1200 --optimizer SGD", marks=NIGHTLY),
        (2, "--loop steps --steps 1200 --optimizer SGD"),
    ],
)
def test_interrupted_and_resumed_is_the_uninterrupted_run(num_ps: int, loop: str, tmp_path: Path) -> None:
    """Ctrl+C saves while everybody still trains, where each knows its place."""
    with started_processes(tmp_path) as processes:
        for out in ("whole", "parts"):
            (tmp_path / out).mkdir()

        def run(run_dir: str, out: str, *more: str) -> Any:
            flags = ["--ps", num_ps, "--workers", 2, "--mode", "sync", "--run-dir", run_dir]
            resume = ["--resume", "none" if more else "auto"]
            return processes.paceline("run", *flags, *resume, PROGRAM, "--out", tmp_path / out, *loop.split(), *more)

        run("a", "whole", "--stop-at=-1").ends_with(0)
        stopped = run("b", "parts", "--stop-at=100").ends_with(130)
        found = load_newest(tmp_path / "b" / "checkpoints")
        assert found is not None and found.state.global_step > 100
        assert f"Saved: b/checkpoints/step-{found.state.global_step:08d}" in stopped.lines
        run("b", "parts").ends_with(0)
    for worker in ("0", "1"):
        assert (tmp_path / "whole" / worker).read_text() == (tmp_path / "parts" / worker).read_text()
