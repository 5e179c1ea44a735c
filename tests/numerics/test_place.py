"""Parts of one model on several tasks equal the single process bit for bit; layers are built again by their names."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from alike import assert_same, weights
from ops_cluster import Tasks, tasks
from torch import nn
from torch.optim import SGD, Adam
from toy import batch, model_of

import paceline
from paceline.errors import ConnectionLost, PacelineError, UsageError
from paceline.ingraph import copies, layers
from paceline.ingraph.op import op
from paceline.ingraph.place import place

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 5
__all__ = ["tasks"]  # a fixture


@op
def make_two_ways() -> nn.Module:
    return TwoWays()


class TwoWays(nn.Module):
    """Several inputs by name and place, several outputs, one of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(37, 7)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, note: str = "") -> dict[str, Any]:
        y = self.inner(x) * scale
        return {"y": y, "largest": (y.argmax(1), note), "twice": [2 * y]}


def parts_of(seed: int = 3) -> nn.Sequential:
    model = model_of(seed)
    return nn.Sequential(model[:2], model[2:4], model[4:])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[Any]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(0, step)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append((loss.detach(), [p.grad for p in model.parameters()], weights(model)))
    return seen


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", [momentum, lambda m: Adam(m.parameters(), lr=0.01)], ids=["momentum", "adam"])
@pytest.mark.parametrize(
    "devices",
    [("/job:worker/task:0", "/job:worker/task:1"), ("/job:worker/task:1/cpu:0", None), ("/cpu:0", "/cpu:0")],
    ids=["two tasks", "one part", "here"],
)
def test_two_parts_equal_the_single_process_bit_for_bit(devices: Any, make: Callable[..., Any], tasks: Tasks) -> None:
    plain, model = parts_of(), parts_of()
    for part, device in zip(model[1:], devices, strict=True):
        if device is not None:
            assert place(part, device) is part
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_same(trained(plain, make(plain)), trained(model, make(model)), "loss, gradients and values")


def test_a_part_that_is_used_twice_and_gradients_that_are_added_up(tasks: Tasks) -> None:
    def run(model: nn.Module) -> Any:
        x = torch.randn(5, 37, generator=torch.Generator().manual_seed(1), requires_grad=True)
        for _ in range(2):
            (model[1](model[0](x)).sum() + model[1](model[0](2 * x)).square().sum()).backward()
        return x.grad, [p.grad for p in model.parameters()]

    plain, model = parts_of(), parts_of()
    place(model[1], "/job:worker/task:1")
    assert_same(run(plain), run(model), "gradients")


def test_several_inputs_and_outputs(tasks: Tasks) -> None:
    def run(module: nn.Module) -> Any:
        x = batch(0, 0).requires_grad_(True)
        scale = torch.tensor(1.5, requires_grad=True)
        told = module(x, scale=scale, note="hello")
        assert not told["largest"][0].requires_grad
        (told["twice"][0].sum() + told["y"].square().sum()).backward()
        return told, x.grad, scale.grad, [p.grad for p in module.parameters()]

    torch.manual_seed(5)
    plain = TwoWays()
    module = copy.deepcopy(plain)
    place(module, "/job:worker/task:0", build=make_two_ways)
    assert_same(run(plain), run(module), "outputs and gradients")


def test_dropout_and_running_statistics_as_in_the_single_process(tasks: Tasks) -> None:
    """The generator's state travels with the forward pass, the statistics come back."""

    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Sequential(nn.Linear(37, 9), nn.Dropout(0.5)),
            nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(9), nn.Linear(9, 3)),
        )

    plain = made()
    torch.manual_seed(8)
    want = trained(plain, momentum(plain))
    model = made()
    place(model[1], "/job:worker/task:1")
    torch.manual_seed(8)
    assert_same(want, trained(model, momentum(model)), "loss, gradients and values")
    plain.eval()
    model.eval()
    with torch.no_grad():
        assert_same(plain(batch(0, 9)), model(batch(0, 9)), "evaluated")


def test_clipping_frozen_layers_and_other_dtypes(tasks: Tasks) -> None:
    def run(model: nn.Module) -> Any:
        model = model.to(torch.float64)
        model[2].requires_grad_(False)
        optimizer = momentum(model)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(0, step).double()).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return weights(model), [p.grad for p in model.parameters()]

    plain, model = parts_of(), parts_of().to(torch.float64)
    place(model[1], "/job:worker/task:0")
    place(model[2], "/job:worker/task:1")
    assert_same(run(plain), run(model), "values and gradients")


def test_with_a_prepared_optimizer_the_parts_parameters_are_on_the_ps(tasks: Tasks) -> None:
    seen: list[Any] = []

    def train() -> None:
        torch.set_num_threads(1)
        ctx = paceline.init()
        model = parts_of()
        place(model[1], "/job:worker/task:1")
        model, optimizer = ctx.prepare(model, momentum(model))
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
        seen.append(weights(model))

    plain = parts_of()
    paceline.launch(train, ps=2, workers=1, mode="sync")
    assert_same(trained(plain, momentum(plain))[-1][2], seen[-1], "values")


# --- parameters that live with the part ---------------------------------------------------------------------------


def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch(0, step)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    return losses


def with_residents(make: Callable[..., Any]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = parts_of()
    optimizers = [make(part) for part in model]
    place(model[1], "/job:worker/task:0", optimizers[1])
    place(model[2], "/job:worker/task:1", optimizers[2])
    return model, optimizers


@pytest.mark.parametrize("make", [momentum, lambda m: Adam(m.parameters(), lr=0.01)], ids=["momentum", "adam"])
def test_parameters_with_the_part_equal_the_single_process(make: Callable[..., Any], tasks: Tasks) -> None:
    plain = parts_of()
    of_plain = [make(part) for part in plain]
    model, optimizers = with_residents(make)
    assert_same(loop(plain, of_plain, range(STEPS)), loop(model, optimizers, range(STEPS)), "losses")
    assert_same(weights(plain), weights(model), "values")
    for mine, its in zip(of_plain, optimizers, strict=True):
        assert_same(mine.state_dict(), its.state_dict(), "optimizer")


def test_they_take_no_room_here_and_reading_them_shows(tasks: Tasks) -> None:
    model, _ = with_residents(momentum)
    for parameter in model[1].parameters():
        assert parameter.untyped_storage().nbytes() == parameter.element_size()
        assert parameter.isnan().all()
    assert not any(value.isnan().any() for value in model.state_dict().values())


def test_saved_and_loaded_they_go_on(tasks: Tasks) -> None:
    model, optimizers = with_residents(momentum)
    loop(model, optimizers, range(3))
    saved = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
    want = loop(model, optimizers, range(3, 6)), weights(model)
    again, others = with_residents(momentum)
    again.load_state_dict(saved[0])
    for optimizer, state in zip(others, saved[1], strict=True):
        optimizer.load_state_dict(state)
    assert again[1][0].weight.isnan().all()
    assert_same(want, (loop(again, others, range(3, 6)), weights(again)), "losses and values")


def test_schedules_added_gradients_and_zero_grad_of_the_whole_model(tasks: Tasks) -> None:
    def run(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
        for step in range(4):
            model.zero_grad()
            for part in range(2):
                model(batch(part, step)).square().mean().backward()
            for each in optimizers:
                each.step()
            for schedule in schedules:
                schedule.step()
        return weights(model)

    plain = parts_of()
    assert_same(run(plain, [momentum(part) for part in plain]), run(*with_residents(momentum)), "values")


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_their_gradients_are_clipped_with_all_others(order: float, tasks: Tasks) -> None:
    def run(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
        norms = []
        for step in range(3):
            model.zero_grad()
            model(batch(0, step)).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, order))
            for each in optimizers:
                each.step()
        return norms, weights(model)

    plain = parts_of()
    assert_same(run(plain, [momentum(part) for part in plain]), run(*with_residents(momentum)), "norms and values")


def test_what_else_is_done_with_their_gradients_is_refused(tasks: Tasks) -> None:
    model, optimizers = with_residents(momentum)
    model(batch(0, 0)).square().mean().backward()
    gradient = model[1][0].weight.grad
    assert str(gradient).endswith("on /job:worker/replica:0/task:0")
    for use in (lambda: gradient + 1, lambda: gradient.zero_(), gradient.isnan, lambda: gradient.norm(dim=0)):
        with pytest.raises(UsageError, match="This gradient is on /job:worker/replica:0/task:0"):
            use()
    with pytest.raises(UsageError, match="This gradient is on"):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="cannot fill them with zeros"):
        optimizers[1].zero_grad(set_to_none=False)


def test_an_error_there_does_not_lose_them(tasks: Tasks) -> None:
    model, optimizers = with_residents(momentum)
    loop(model, optimizers, range(2))
    before = weights(model)
    with pytest.raises(PacelineError, match="mat1 and mat2 shapes"):
        model[1](torch.ones(5, 4))
    assert_same(before, weights(model), "values")
    loop(model, optimizers, range(2, 3))
    assert not torch.equal(before["1.2.weight"], weights(model)["1.2.weight"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: torch.optim.LBFGS(model[1].parameters()), "LBFGS cannot run on another task"),
        (lambda model: SGD(model.parameters(), lr=0.1), "all of them and no others"),
        (lambda model: SGD([model[1][0].weight], lr=0.1), "all of them and no others"),
    ],
)
def test_an_optimizer_that_cannot_go_along_is_refused(make: Callable[..., Any], said: str, tasks: Tasks) -> None:
    model = parts_of()
    with pytest.raises(UsageError, match=said):
        place(model[1], "/job:worker/task:1", make(model))


# --- what is kept there -------------------------------------------------------------------------------------------


def passes_kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After each forward pass there: how many passes are kept."""
    kept: list[int] = []
    plain = copies.forward.fn

    def forward(*args: Any) -> Any:
        told = plain(*args)
        assert copies._here.copy is not None
        kept.append(len(copies._here.copy.passes))
        return told

    monkeypatch.setattr(copies.forward, "fn", forward)
    return kept


def test_no_pass_is_kept_that_nobody_asks_for(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = passes_kept(monkeypatch)
    model = parts_of()
    place(model[1], "/job:worker/task:1")
    for step in range(3):
        model(batch(0, step)).sum().backward()
    assert kept == [1, 1, 1]
    for step in range(3):
        out = model(batch(0, step))  # its backward never comes
        del out
        gc.collect()
    assert kept[3:] == [1, 1, 1]
    with torch.no_grad():
        model(batch(0, 0))
    assert kept[-1] == 0


def test_backward_may_come_twice_if_it_says_so(tasks: Tasks) -> None:
    model, plain = parts_of(), parts_of()
    place(model[1], "/job:worker/task:1")
    for each in (plain, model):
        loss = each(batch(0, 0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()], "gradients")


def test_a_second_derivative_is_refused_by_torch(tasks: Tasks) -> None:
    model = parts_of()
    place(model[1], "/job:worker/task:1")
    x = batch(0, 0).requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_pass_from_before_a_failure_is_gone_and_the_next_one_works(tasks: Tasks) -> None:
    model, plain = parts_of(), parts_of()
    place(model[1], "/job:worker/task:1")
    early = model(batch(0, 0)).sum()
    with pytest.raises(PacelineError, match="mat1 and mat2 shapes"):
        model[1](torch.ones(5, 4))
    model(batch(0, 1)).sum().backward()
    plain(batch(0, 1)).sum().backward()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()], "gradients")
    with pytest.raises(ConnectionLost, match=r"task:1: the forward pass of this backward is not here any more"):
        early.backward()


@pytest.mark.parametrize(
    ("module", "device", "said"),
    [
        (nn.Linear(3, 3), "/job:nobody/task:0", "no job 'nobody'"),
        (nn.Linear(3, 3), "/job:worker/task:2", "no task worker:2"),
        (nn.Linear(3, 3), "gpu", "does not begin with a slash"),
        (TwoWays(), "/job:worker/task:1", r"TwoWays is no plain layer of torch\.nn"),
        ([nn.Linear(3, 3)], "/cpu:0", "takes a module and a device, not a list"),
    ],
)
def test_refused_in_one_sentence(module: Any, device: str, said: str, tasks: Tasks) -> None:
    with pytest.raises(UsageError, match=said):
        place(module, device)


def test_placed_once_and_not_copied(tasks: Tasks) -> None:
    part = place(nn.Linear(3, 3), "/job:worker/task:1")
    with pytest.raises(UsageError, match="place it once"):
        place(part, "/job:worker/task:0")
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(part)


# --- layers by name -----------------------------------------------------------------------------------------------

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
ROWS = torch.randn(6, 12, generator=torch.Generator().manual_seed(4))
SERIES = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(4))
EXAMPLES: list[tuple[nn.Module, torch.Tensor]] = [
    (nn.Linear(12, 3, bias=False), ROWS),
    (nn.BatchNorm1d(12, momentum=0.3), ROWS),
    (nn.LayerNorm((5, 12), bias=False), SERIES),
    (nn.GroupNorm(3, 3, eps=0.1), IMAGES),
    (nn.Conv2d(3, 6, (3, 2), stride=2, padding="valid", groups=3, padding_mode="reflect"), IMAGES),
    (nn.Conv1d(5, 2, 3, dilation=2), SERIES),
    (nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), IMAGES),
    (nn.BatchNorm2d(3, affine=False, track_running_stats=False), IMAGES),
    (nn.Conv3d(2, 3, 2), IMAGES[None]),
    (nn.BatchNorm3d(1), IMAGES[:, None]),
    (nn.MaxPool2d(3, stride=2, ceil_mode=True), IMAGES),
    (nn.MaxPool1d(2), SERIES),
    (nn.AvgPool2d(2, count_include_pad=False, divisor_override=3), IMAGES),
    (nn.AvgPool1d(3), SERIES),
    (nn.AdaptiveAvgPool2d((2, None)), IMAGES),
    (nn.AdaptiveAvgPool1d(4), SERIES),
    (nn.AdaptiveMaxPool2d(2), IMAGES),
    (nn.LocalResponseNorm(4, alpha=1e-3, beta=0.5, k=2.0), IMAGES),
    (nn.ZeroPad2d((1, 0, 2, 0)), IMAGES),
    (nn.Embedding(10, 4, padding_idx=1, max_norm=0.5), torch.tensor([[1, 2], [3, 9]])),
    (nn.LSTM(12, 3, num_layers=2, bidirectional=True), SERIES),
    (nn.GRU(12, 3, bias=False, batch_first=True), SERIES),
    (nn.PReLU(5, init=0.1), SERIES),
    (nn.Flatten(1, 2), IMAGES),
    (nn.Unflatten(1, (3, 4)), ROWS),
    (nn.Softplus(beta=2.0), ROWS),
    (nn.Softmax(dim=1), ROWS),
    (nn.LogSoftmax(dim=-1), ROWS),
    (nn.LeakyReLU(0.3, inplace=True), ROWS),
    (nn.ELU(alpha=0.5), ROWS),
    (nn.GELU(approximate="tanh"), ROWS),
    (nn.SiLU(), ROWS),
    (nn.Tanh(), ROWS),
    (nn.Sigmoid(), ROWS),
    (nn.ReLU(), ROWS),
    (nn.Identity(), ROWS),
    (nn.Dropout(0.3), ROWS),
    (nn.Dropout2d(0.3), IMAGES),
]


def test_the_examples_are_the_whole_catalogue() -> None:
    assert {type(module).__name__ for module, _ in EXAMPLES} == set(layers.LAYERS)


@pytest.mark.parametrize(("module", "given"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_layer_that_is_built_again_is_the_same(module: nn.Module, given: torch.Tensor) -> None:
    built = layers.build(layers.describe(module))
    assert repr(built) == repr(module)
    built.load_state_dict(module.state_dict())
    torch.manual_seed(6)
    want = module(given.clone())
    torch.manual_seed(6)
    assert_same(want, built(given.clone()), "outputs")


def test_a_layer_that_stands_twice_is_one_layer_there_too() -> None:
    shared = nn.Linear(4, 4)
    built = layers.build(layers.describe(nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared))))
    assert built[0] is built[1][1]


def _with_hook() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_forward_hook(lambda *_: None)
    return module


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


def _parametrised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("make", "said"),
    [(_with_hook, "has hooks"), (_tied, "two layers share a tensor"), (_parametrised, "is no plain layer")],
)
def test_what_words_cannot_tell_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(UsageError, match=f"{said}.*Give build="):
        layers.describe(make())
