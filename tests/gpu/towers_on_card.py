"""WHAT holds for towers and placed modules on a real card? Each check compares with plain PyTorch on the same card.

Run by tests/gpu/on_card.py. Bit for bit where the same kernels see the same numbers in the same order; to the rounding
where an optimizer's step is made once by the CPU and once by the card.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from on_card import in_this_process, main
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.errors import UsageError
from paceline.ingraph.draws import turn_of
from paceline.transport import port_reservation

CARD = torch.device("cuda", 0)
STEPS = 5
VIRTUAL = ("/gpu:0", "/gpu:1")


@paceline.op
def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(images), labels)


@paceline.op
def ones() -> torch.Tensor:
    return torch.ones(2)


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
def worker(config: paceline.ConfigProto | None = None) -> Iterator[None]:
    """A task worker:0 in this process, which is itself only a client."""
    address = f"localhost:{port_reservation.free_port('localhost')}"
    server = paceline.Server({"worker": [address]}, "worker", 0, config=config)
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
    devices = ["/job:worker/task:0/gpu:0", "/gpu:1"]
    with worker():
        model = model_of()
        with paceline.towers(model, sgd(model), devices) as towers:
            assert all(name.endswith("(virtual)") for name in towers.devices), towers.devices
        same(reference(2, torch.device("cpu")), trained(devices))
    return "/job:worker/task:0/gpu:0 and /gpu:1, marked as virtual: the bits of plain PyTorch"


def check_dropout() -> str:
    """What a far tower draws depends on the seed alone, and the card's generator is as before."""

    def run() -> tuple[list[float], nn.Module]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 10))
        with paceline.towers(model, sgd(model), ["/job:worker/task:0/gpu:0"]) as towers:
            before = generator.get_state()
            told = [towers.step(loss, [batch(0, 0)]).item() for _ in range(STEPS)]
            assert torch.equal(before, generator.get_state()), "the card's generator was left changed"
        return told, model

    torch.zeros(1, device=CARD)  # CUDA has started
    generator = turn_of(CARD).generator
    with worker():
        first, one = run()
        torch.rand(7, device=CARD)
        second, two = run()
    same(one, two)
    assert first == second and len(set(first)) == STEPS, (first, second)
    return "twice the same draws on the card, whose own generator is as before"


def looped(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], max_norm: float | None, is_cast: bool
) -> list[float]:
    """The loss of each step, and before it the norm if gradients are clipped. `is_cast`: forward with autocast."""
    told = []
    for step in range(STEPS):
        images, labels = batch(0, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_cast):
            output = model(images)
        value = cross_entropy(output.float(), labels)
        value.backward()
        if max_norm is not None:
            told.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        for optimizer in optimizers:
            optimizer.step()
        told.append(value.item())
    return told


class ByHand(nn.Module):
    """The third layer on the card, the tensors moved by hand."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.inner = model
        model[2].to(CARD)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.inner[2](self.inner[:2](images).to(CARD)).cpu()


def part_reference(max_norm: float | None = None, is_cast: bool = False) -> tuple[nn.Module, list[float]]:
    model = model_of()
    by_hand = ByHand(model)
    return model, looped(by_hand, [sgd(model)], max_norm, is_cast)


def placed(
    device: str, has_own_optimizer: bool = False, max_norm: float | None = None, is_cast: bool = False
) -> tuple[nn.Module, list[float]]:
    model = model_of()
    own = [sgd(model[2])] if has_own_optimizer else []
    paceline.place(model[2], device, *own)
    return model, looped(model, [sgd(model[:2]), *own] if own else [sgd(model)], max_norm, is_cast)


def near(wanted: Sequence[float], got: Sequence[float]) -> None:
    assert all(abs(a - b) < 1e-5 for a, b in zip(wanted, got, strict=True)), (wanted, got)


def check_place() -> str:
    model, losses = placed("/gpu:0")
    want, wanted = part_reference()
    same(want, model)
    assert losses == wanted
    return "a part on /gpu:0"


def check_place_far() -> str:
    _, wanted = part_reference()
    with worker():
        for own in (False, True):
            assert placed("/job:worker/task:0/gpu:0", own)[1] == wanted
    return "a part on /job:worker/task:0/gpu:0, its parameters here and there"


def check_autocast() -> str:
    _, wanted = part_reference(is_cast=True)
    assert wanted != part_reference()[1], "autocast changed nothing"
    assert placed("/gpu:0", is_cast=True)[1] == wanted
    with worker():
        for own in (False, True):
            assert placed("/job:worker/task:0/gpu:0", own, is_cast=True)[1] == wanted
    return "a part in bfloat16, on /gpu:0 and on /job:worker/task:0/gpu:0"


def check_clipping() -> str:
    _, wanted = part_reference(max_norm=0.5)
    assert all(norm > 0.5 for norm in wanted[::2]), wanted
    with worker():
        near(wanted, placed("/job:worker/task:0/gpu:0", has_own_optimizer=True, max_norm=0.5)[1])
    return "clip_grad_norm_ over parameters here and on the card"


def check_config() -> str:
    """The last one: it takes memory."""
    config = paceline.ConfigProto(allow_soft_placement=False)
    config.gpu_options.allow_growth = False
    config.gpu_options.per_process_gpu_memory_fraction = 0.2
    total = torch.cuda.get_device_properties(CARD).total_memory
    torch.cuda.empty_cache()
    with worker(config):
        reserved = torch.cuda.memory_reserved(CARD) / total
        assert 0.18 < reserved < 0.21, reserved
        try:
            torch.empty(int(0.25 * total), dtype=torch.uint8, device=CARD)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("more than the fraction was to be had")
        try:
            with paceline.device("/job:worker/task:0/gpu:7"):
                ones()
        except UsageError as refused:
            assert "no /gpu:7 here" in str(refused), refused
        else:
            raise AssertionError("a missing GPU was replaced")
    torch.cuda.set_per_process_memory_fraction(1.0, CARD)
    torch.cuda.empty_cache()
    return f"a server's ConfigProto: {reserved:.3f} of the card at once, no more, and no CPU instead of /gpu:7"


CHECKS = {
    "virtual": in_this_process(check_virtual),
    "variables on the card": in_this_process(check_variables_on_the_card),
    "async": in_this_process(check_async),
    "far towers": in_this_process(check_far_towers),
    "dropout": in_this_process(check_dropout),
    "place": in_this_process(check_place),
    "place far": in_this_process(check_place_far),
    "autocast": in_this_process(check_autocast),
    "clipping": in_this_process(check_clipping),
    "config": in_this_process(check_config),
}


if __name__ == "__main__":
    sys.exit(main(CHECKS))
