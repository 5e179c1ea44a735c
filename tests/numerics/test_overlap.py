"""--overlap: gradients leave while backward runs, and what counts is still what step() means, bit for bit."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import TrainingFailed
from paceline.frameworks.torch.overlap import Overlap

LOCK = threading.Lock()
Change = Callable[[nn.Module, torch.Tensor], None]


def nothing(model: nn.Module, x: torch.Tensor) -> None:
    pass


def clip(model: nn.Module, x: torch.Tensor) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def accumulate(model: nn.Module, x: torch.Tensor) -> None:
    model(x + 1).square().mean().backward()


def replace(model: nn.Module, x: torch.Tensor) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2


def lose(model: nn.Module, x: torch.Tensor) -> None:
    model.get_parameter("2.bias").grad = None


def spoil(model: nn.Module, x: torch.Tensor) -> None:
    if x[0, 0] > 0:
        gradient = model.get_parameter("2.bias").grad
        assert gradient is not None
        gradient[0] = float("nan")


CHANGES: list[Change] = [nothing, clip, accumulate, replace, lose, spoil]


def trained(change: Change, **options: Any) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
    """Two workers' parameters after a few steps of a model whose shards are over 1 MiB each."""
    got: list[dict[str, torch.Tensor]] = [{}, {}]

    def work(ctx: paceline.Context) -> None:
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 900))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        numbers = torch.Generator().manual_seed(ctx.worker_index)
        for _ in range(5):
            x = torch.randn(4, 600, generator=numbers)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            change(model, x)
            optimizer.step()
        got[ctx.worker_index] = {name: value.clone() for name, value in model.state_dict().items()}

    summary = paceline.launch(work, mode="sync", lane="tcp", **options)
    return got, summary


@pytest.mark.filterwarnings("ignore:paceline")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_step_means_is_what_counts(change: Change) -> None:
    plain, _ = trained(change, ps=2)
    overlapped, summary = trained(change, ps=2, overlap=True)
    assert summary["global_step"] == 5 or change is spoil
    for ours, theirs in zip(overlapped, plain, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_most_of_a_gradient_has_left_before_step(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: list[str] = []
    flushing = threading.local()
    hand_over, flush = Overlap._hand_over, Overlap.flush

    def noting(self: Overlap, index: int, gradient: torch.Tensor) -> None:
        handed_over.append("step" if getattr(flushing, "is_on", False) else "backward")
        hand_over(self, index, gradient)

    def in_step(self: Overlap, gradients: Any) -> None:
        flushing.is_on = True
        flush(self, gradients)
        flushing.is_on = False

    monkeypatch.setattr(Overlap, "_hand_over", noting)
    monkeypatch.setattr(Overlap, "flush", in_step)
    trained(nothing, ps=1, workers=1, overlap=True)
    assert handed_over == ["backward"] * 20, "four tensors in each of five steps"


def test_a_scaler_is_refused() -> None:
    def work(ctx: paceline.Context) -> None:
        model = nn.Linear(600, 700)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(1, 600)).mean()).backward()
        scaler.step(optimizer)

    with pytest.raises(TrainingFailed, match="before a GradScaler has unscaled them"):
        paceline.launch(work, workers=1, lane="tcp", overlap=True)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_backward_while_the_last_push_is_not_answered_and_a_pull_before_step(num_ps: int) -> None:
    """Buckets must not overwrite what a ps still reads, nor believe in what a pull has overwritten."""

    def train(ctx: paceline.Context) -> list[torch.Tensor]:
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(600, 700), nn.Linear(700, 900))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((1, 600), float(step))).mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model.parameters()).backward()  # no forward pass: the answer is pending
        ctx.pull()
        optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    got: dict[bool, list[torch.Tensor]] = {}
    for overlap in (False, True):
        keep = got.setdefault(overlap, [])
        options: dict[str, Any] = {"ps": num_ps, "workers": 1, "mode": "sync", "lane": "tcp", "overlap": overlap}
        paceline.launch(lambda ctx, keep=keep: keep.extend(train(ctx)), **options)
    assert all(torch.equal(a, b) for a, b in zip(got[False], got[True], strict=True))


def test_an_error_of_the_sending_thread_reaches_step() -> None:
    def work(ctx: paceline.Context) -> None:
        model = nn.Linear(600, 700)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        ctx._session.training_step._overlap._outgoing.as_laid_out = None  # what is called next is no function
        model(torch.ones(1, 600)).mean().backward()
        optimizer.step()

    with pytest.raises(TrainingFailed, match="not callable"):
        paceline.launch(work, workers=1, lane="tcp", overlap=True)
