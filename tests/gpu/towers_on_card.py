"""WHAT holds for towers and placed modules on a real card? Each check compares with plain PyTorch on the same card.

`PYTHONPATH=src python tests/gpu/towers_on_card.py` runs all of them and prints a line each;
tests/gpu/test_towers_on_card.py is the same for pytest. Needs one card, and nothing but what paceline itself needs.
"""

import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.cluster.pinning import GpuUse
from paceline.transport import held
from paceline.worker import torch_devices

CARD = torch.device("cuda", 0)
STEPS = 5
VIRTUAL = ("/gpu:0", "/gpu:1")


@paceline.op
def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(images), labels)


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def batch(tower: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + tower)
    return torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def reference(towers: int, variables: torch.device) -> nn.Module:
    """Gradients on the card one after the other, their mean and the optimizer where the variables are."""
    model = model_of().to(variables)
    optimizer, there = sgd(model), copy.deepcopy(model).to(CARD)
    for step in range(STEPS):
        there.load_state_dict(model.state_dict())
        parts = []
        for tower in range(towers):
            there.zero_grad()
            images, labels = batch(tower, step)
            cross_entropy(there(images.to(CARD)), labels.to(CARD)).backward()
            parts.append([p.grad.to(variables) for p in there.parameters()])
        for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
            parameter.grad = sum(gradients[1:], gradients[0].clone()) / towers
        optimizer.step()
    return model


def trained(devices: Sequence[str], **options: Any) -> nn.Module:
    model = model_of()
    with paceline.towers(model, sgd(model), devices, **options) as towers:
        for step in range(STEPS):
            towers.step(loss, [batch(tower, step) for tower in range(len(devices))])
    return model


def same(want: nn.Module, got: nn.Module) -> None:
    for (name, mine), its in zip(want.state_dict().items(), got.state_dict().values(), strict=True):
        assert mine.device == its.device, (name, mine.device, its.device)
        assert torch.equal(mine, its), f"{name}: up to {(mine - its).abs().max().item()} apart"


@contextmanager
def worker() -> Iterator[None]:
    """A task worker:0 in this process, which is itself only a client."""
    address = f"localhost:{held.free_port('localhost')}"
    server = paceline.Server({"worker": [address]}, "worker", 0)
    try:
        with paceline.connect({"worker": [address]}):
            yield
    finally:
        server.stop()


def check_virtual() -> str:
    same(reference(2, torch.device("cpu")), trained(VIRTUAL))
    return "/gpu:0 and /gpu:1 on one card, variables on /cpu:0: the bits of plain PyTorch"


def check_variables_on_the_card() -> str:
    same(reference(2, CARD), trained(VIRTUAL, variables="/gpu:0"))
    return "variables on /gpu:0"


def check_async() -> str:
    model = model_of()
    with paceline.towers(model, sgd(model), VIRTUAL, mode="async") as towers:
        told = [update.loss.item() for update in towers.train(loss, (batch(0, 0) for _ in range(40)))]
    assert len(told) == 40 and told[-1] < told[0], told
    return f"40 updates, loss {told[0]:.2f} -> {told[-1]:.2f}"


def check_far_towers() -> str:
    with worker():
        same(reference(2, torch.device("cpu")), trained(["/job:worker/task:0/gpu:0", "/gpu:1"]))
    return "/job:worker/task:0/gpu:0 and /gpu:1"


def part_reference() -> tuple[nn.Module, list[float]]:
    model = model_of()
    model[2].to(CARD)
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        images, labels = batch(0, step)
        optimizer.zero_grad()
        value = cross_entropy(model[2](model[1](model[0](images)).to(CARD)).cpu(), labels)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return model, losses


def placed(device: str, has_own_optimizer: bool = False) -> tuple[nn.Module, list[float]]:
    model = model_of()
    own = [sgd(model[2])] if has_own_optimizer else []
    paceline.place(model[2], device, *own)
    optimizers, losses = [sgd(model[:2]), *own] if own else [sgd(model)], []
    for step in range(STEPS):
        images, labels = batch(0, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = cross_entropy(model(images), labels)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(value.item())
    return model, losses


def check_place() -> str:
    model, losses = placed("/gpu:0")
    want, wanted = part_reference()
    same(want, model)
    assert losses == wanted
    return "a part on /gpu:0"


def check_place_far() -> str:
    """The optimizer's arithmetic is the CPU's in one case and the card's in the other: equal to the rounding."""
    _, wanted = part_reference()
    with worker():
        for own in (False, True):
            _, losses = placed("/job:worker/task:0/gpu:0", own)
            assert all(abs(a - b) < 1e-5 for a, b in zip(wanted, losses, strict=True)), (own, wanted, losses)
    return "a part on /job:worker/task:0/gpu:0, its parameters here and there"


CHECKS: dict[str, Callable[[], str]] = {
    "virtual": check_virtual,
    "variables on the card": check_variables_on_the_card,
    "async": check_async,
    "far towers": check_far_towers,
    "place": check_place,
    "place far": check_place_far,
}


def run(name: str) -> str:
    torch_devices.configure(GpuUse(virtual=2))
    with tempfile.TemporaryDirectory() as config:
        os.environ["XDG_CONFIG_HOME"] = config  # a secret of this check's own
        return CHECKS[name]()


def main() -> None:
    for name in CHECKS:
        print(f"{name}: {run(name)}", flush=True)


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    main()
