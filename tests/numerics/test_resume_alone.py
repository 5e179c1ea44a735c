"""A checkpoint goes on in plain PyTorch: paceline.load_checkpoint gives a model and an optimizer their bits back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from alike import assert_same, weights
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.errors import UsageError


def net() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    return model.to(memory_format=torch.channels_last)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    mse_loss(model(x), x.flatten(1)[:, :3]).backward()
    optimizer.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    conv, _, _, linear = model.children()
    return [{"params": conv.parameters(), "lr": 0.03}, {"params": linear.parameters(), "lr": 0.01}]


def trained(tmp_path: Path, steps: int, **options: Any) -> None:
    def work(ctx: Any) -> None:
        torch.set_num_threads(1)
        model = net()
        model, optimizer = ctx.prepare(model, torch.optim.AdamW(groups(model)))
        for number in range(steps):
            step(model, optimizer, number)
            if number == 5:
                optimizer.param_groups[0]["lr"] = 0.007

    paceline.launch(work, ps=2, workers=1, mode="sync", run_dir=str(tmp_path), **options)


def test_one_process_goes_on_at_the_same_bit(tmp_path: Path) -> None:
    trained(tmp_path / "first", 10)
    trained(tmp_path / "whole", 18)
    torch.manual_seed(99)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(groups(model))
    assert paceline.load_checkpoint(tmp_path / "first", model, optimizer) == 10
    assert [group["lr"] for group in optimizer.param_groups] == [0.007, 0.01]
    for number in range(10, 18):
        step(model, optimizer, number)
    want = net()
    assert paceline.load_checkpoint(tmp_path / "whole" / "checkpoints" / "step-00000018", want) == 18
    assert_same(weights(want), weights(model), "model")


def test_the_averages_instead(tmp_path: Path) -> None:
    trained(tmp_path, 6, ema=0.5)
    last, averaged = net(), net()
    paceline.load_checkpoint(tmp_path, last)
    paceline.load_checkpoint(tmp_path, averaged, ema=True)
    assert not torch.equal(last[0].weight, averaged[0].weight)  # type: ignore[index]
    trained(tmp_path / "none", 2)
    with pytest.raises(UsageError, match="not started with --ema"):
        paceline.load_checkpoint(tmp_path / "none", net(), ema=True)


@pytest.mark.parametrize("wrong", ["model", "optimizer", "groups", "folder"])
def test_what_does_not_fit_is_refused(wrong: str, tmp_path: Path) -> None:
    trained(tmp_path, 2)
    model: nn.Module = net()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups(model))
    path, reason = tmp_path, "another model"
    if wrong == "model":
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
    elif wrong == "optimizer":
        optimizer, reason = torch.optim.SGD(groups(model)), "written by AdamW, not by SGD"
    elif wrong == "groups":
        optimizer, reason = torch.optim.AdamW(model.parameters()), "2 parameter groups, this optimizer 1"
    else:
        path = Path("auto")  # means nothing here: there is no run
        reason = r"^load_checkpoint\('auto'\): there is no such folder; give a checkpoint or a run folder"
    with pytest.raises(UsageError, match=reason):
        paceline.load_checkpoint(path, model, optimizer)
