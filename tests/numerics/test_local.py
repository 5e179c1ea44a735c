"""Mode local: H steps of the worker's own optimizer, then one exchange. Bit for bit one process that does the same.

The reference below keeps one model a worker. Between exchanges each trains from the common parameters w with its own
torch optimizer; then torch's SGD steps w along the mean of (w - v0), (w - v1), … in worker order.
"""

import copy
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, mean, run_cluster, weights
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from toy import LANES, batch, drawn, give, gradients, model_of

import paceline
from paceline.errors import TrainingFailed

pytestmark = pytest.mark.filterwarnings("error")


class Training:
    """One worker's own loop: its optimizer, and whatever else happens in a step."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizer = make(model.parameters())

    def step(self, worker: int, number: int) -> None:
        gradients(self.model, batch(worker, number))
        self.optimizer.step()


Make = Callable[[nn.Module], Training]


def sgd(model: nn.Module) -> Training:
    return Training(model, lambda p: SGD(p, lr=0.05))


def adamw(model: nn.Module) -> Training:
    return Training(model, lambda p: AdamW(p, lr=0.01, weight_decay=0.1))


def reference(
    make: Make,
    workers: int,
    exchanges: int,
    local_steps: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    seed: int = 3,
    rest: int = 0,
) -> tuple[dict[str, torch.Tensor], list[Training]]:
    """The same arithmetic in one process. `rest`: so many steps are left for one more exchange."""
    common = model_of(seed)
    outer = SGD(common.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    trainings = [make(model_of()) for _ in range(workers)]
    for exchange in range(exchanges + bool(rest)):
        for worker, training in enumerate(trainings):
            training.model.load_state_dict(common.state_dict())
            for number in range(local_steps if exchange < exchanges else rest):
                training.step(worker, exchange * local_steps + number)
        moved = [t.model.parameters() for t in trainings]
        for parameter, *own in zip(common.parameters(), *moved, strict=True):
            parameter.grad = mean([parameter.detach() - v.detach() for v in own])
        outer.step()
    return weights(common), trainings


def recipe_of(make: Make, steps: int) -> Callable[[Job], Returned]:
    def recipe(job: Job) -> Returned:
        training = make(model_of(seed=3 if job.index == 0 else 99 + job.index))  # the chief's values count
        job.prepare(training.model, training.optimizer)
        for number in range(steps):
            training.step(job.index, number)
        return {"model": weights(training.model), "optimizer": copy.deepcopy(training.optimizer.state_dict())}

    return recipe


def holds(
    make: Make, workers: int, exchanges: int, local_steps: int, rate: tuple[float, float] = (0.7, 0.9), **options: Any
) -> None:
    want, trainings = reference(make, workers, exchanges, local_steps, *rate)
    got, summary = run_cluster(
        recipe_of(make, exchanges * local_steps),
        workers,
        mode="local",
        local_steps=local_steps,
        outer_lr=rate[0],
        outer_momentum=rate[1],
        save_every="none",
        **options,
    )
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")
        assert_same(trainings[index].optimizer.state_dict(), each["optimizer"], f"optimizer {index}")
    assert summary["global_step"] == exchanges
    assert [row["steps"] for row in summary["workers"]] == [exchanges * local_steps] * workers


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("lane", LANES)
def test_one_step_and_a_plain_outer_sgd_is_nearly_sync(workers: int, lane: str) -> None:
    """w - ((w - v0) + (w - v1)) / 2 is sync's update but for rounding; and the reference to the bit."""
    holds(sgd, workers, 20, 1, (1.0, 0.0), ps=2, lane=lane)
    local, _ = reference(sgd, workers, 20, 1, 1.0, 0.0)
    sync, _ = run_cluster(recipe_of(sgd, 20), workers, mode="sync", ps=2, lane=lane, save_every="none")
    for name, value in sync[0]["model"].items():
        assert torch.allclose(local[name], value, rtol=0, atol=2e-6), name


CASES = [
    (1, 1, "bytes", "inproc"),
    (2, 1, "bytes", "shm"),
    (2, 2, "round_robin", "tcp"),
    (3, 2, "bytes", "tcp"),
    (2, 3, "greedy", "inproc"),
    (3, 3, "bytes", "shm"),
]


@pytest.mark.parametrize(("workers", "ps", "placement", "lane"), CASES)
def test_four_steps_and_nesterov(workers: int, ps: int, placement: str, lane: str) -> None:
    holds(adamw, workers, 5, 4, ps=ps, placement=placement, lane=lane)


NIGHTLY = pytest.mark.nightly("bits that differ where three or more of these choices meet")
SQUARE = [  # of the first nine every pair of two choices is one
    pytest.param(
        workers + 1,
        ps + 1,
        ["bytes", "round_robin", "greedy"][placement],
        LANES[lane],
        marks=pytest.mark.slow if (placement, lane) == ((workers + ps) % 3, (workers + 2 * ps) % 3) else NIGHTLY,
    )
    for workers, ps, placement, lane in product(range(3), repeat=4)
]


@pytest.mark.parametrize(("workers", "ps", "placement", "lane"), SQUARE)
def test_four_steps_and_nesterov_everywhere(workers: int, ps: int, placement: str, lane: str) -> None:
    holds(adamw, workers, 8, 4, ps=ps, placement=placement, lane=lane)


@pytest.mark.parametrize("lane", LANES)
def test_an_asynchronous_outer_step_of_one_worker_is_the_reference(lane: str) -> None:
    holds(adamw, 1, 5, 3, ps=2, lane=lane, outer="async")


@pytest.mark.parametrize(("outer", "momentum"), [("sync", 0.9), ("async", 0.0)])
def test_without_a_word_on_it_the_outer_momentum_is_none_where_deltas_are_old(outer: str, momentum: float) -> None:
    want, _ = reference(adamw, 1, 3, 2, 0.7, momentum)
    got, _ = run_cluster(recipe_of(adamw, 6), 1, mode="local", local_steps=2, outer=outer, ps=2, save_every="none")
    assert_same(want, got[0]["model"], outer)


# --- the worker's optimizer is its own ------------------------------------------------------------------------------


class Normed(torch.optim.Optimizer):
    """Not elementwise: every step has the length of the rate, whatever the gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / float(norm))
                self.state[parameter]["norm"] = norm.clone()
        return loss


class Wrapped(SGD):
    """Calls the step of its base, which has torch's hooks around it as its own step has."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        return loss


class WithClosure(Training):
    def step(self, worker: int, number: int) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(batch(worker, number)).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Scheduled(Training):
    """A scheduler, and hooks that change the gradient and count."""

    def __init__(self, model: nn.Module, is_before: bool) -> None:
        super().__init__(model, lambda p: SGD(p, lr=0.1, momentum=0.9))
        self.scheduler = StepLR(self.optimizer, 2, 0.5) if is_before else None
        self.seen: list[str] = []
        self.optimizer.register_step_pre_hook(self._halve)
        self.optimizer.register_step_post_hook(lambda *_: self.seen.append("post"))

    def _halve(self, *_: Any) -> None:
        self.seen.append("pre")
        for parameter in self.model.parameters():
            parameter.grad.mul_(0.5)

    def step(self, worker: int, number: int) -> None:
        if self.scheduler is None:
            self.scheduler = StepLR(self.optimizer, 2, 0.5)
        super().step(worker, number)
        self.scheduler.step()
        assert self.seen == ["pre", "post"] * (number + 1)
        assert self.optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** ((number + 1) // 2)


class Scaled(Training):
    """A GradScaler, which leaves out the step whose gradient overflowed; the worker waits for no exchange then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, lambda p: SGD(p, lr=0.05, momentum=0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(self, worker: int, number: int) -> None:
        for is_bad in (True, False) if number == 3 else (False,):
            self.optimizer.zero_grad()
            loss = self.model(batch(worker, number)).square().mean() * (float("inf") if is_bad else 1.0)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


class PartlyFrozen(Training):
    def __init__(self, model: nn.Module) -> None:
        model[0].requires_grad_(False)
        super().__init__(model, lambda p: AdamW(p, lr=0.01, weight_decay=0.5))


ANY: dict[str, Make] = {
    "LBFGS": lambda m: WithClosure(m, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4)),
    "ASGD": lambda m: WithClosure(m, lambda p: torch.optim.ASGD(p, lr=0.05, t0=3)),
    "Adafactor": lambda m: Training(m, lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "a class of the script": lambda m: WithClosure(m, lambda p: Normed(p, lr=0.1)),
    "a subclass that calls its base": lambda m: Training(m, lambda p: Wrapped(p, lr=0.1, momentum=0.5)),
    "a scheduler made before": lambda m: Scheduled(m, True),
    "a scheduler made after": lambda m: Scheduled(m, False),
    "a GradScaler": Scaled,
    "frozen parameters": PartlyFrozen,
}


@pytest.mark.parametrize("name", ANY)
def test_any_optimizer(name: str) -> None:
    SGD([nn.Parameter(torch.ones(1))])  # from its first instance on a class has hooks around its step
    lane = LANES[sorted(ANY).index(name) % 3]
    holds(ANY[name], 2, 4, 2, ps=2, lane=lane)


def test_a_step_that_raised_is_no_step() -> None:
    """The closure fails once; the script goes on."""

    def recipe(job: Job) -> Returned:
        training = WithClosure(model_of(), lambda p: torch.optim.ASGD(p, lr=0.05))
        job.prepare(training.model, training.optimizer)
        for number in range(6):
            if number == 3:
                with pytest.raises(ZeroDivisionError):
                    training.optimizer.step(lambda: 1 / 0)
            training.step(job.index, number)
        return {"model": weights(training.model)}

    want, _ = reference(lambda m: WithClosure(m, lambda p: torch.optim.ASGD(p, lr=0.05)), 2, 3, 2)
    got, summary = run_cluster(recipe, 2, mode="local", local_steps=2, ps=1, save_every="none")
    assert_same(want, got[0]["model"], "worker 0")
    assert [row["steps"] for row in summary["workers"]] == [6, 6]


def test_a_group_added_after_prepare_is_refused() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        _, optimizer = job.prepare(model, SGD(model[0].parameters(), lr=0.1))
        optimizer.add_param_group({"params": model[2].parameters()})
        return {}

    with pytest.raises(TrainingFailed, match="add_param_group after prepare"):
        run_cluster(recipe, 1, mode="local", ps=1)


def test_the_optimizer_is_the_same_object_of_its_own_class() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        optimizer = Normed(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1)
        given = (scheduler, optimizer, model)
        back = job.prepare(*given)
        assert all(a is b for a, b in zip(given, back, strict=True))
        assert isinstance(optimizer, Normed)
        assert type(optimizer).__name__ == "Normed"
        return {}

    run_cluster(recipe, 1, mode="local", ps=1)


# --- rounds, tickets ------------------------------------------------------------------------------------------------


class Constant(Training):
    """Everybody's gradient is the same, so that any contributors make the same update."""

    def step(self, worker: int, number: int) -> None:
        self.model(batch(worker, number))
        give(self.model, drawn(self.model, number % 2))
        self.optimizer.step()


def constant(model: nn.Module) -> Training:
    return Constant(model, lambda p: SGD(p, lr=0.05))


ROUNDS = [(3, {"replicas_to_aggregate": 2}), (2, {"replicas_to_aggregate": 4}), (2, {"replicas_to_aggregate": 1})]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("workers", "options"), ROUNDS)
def test_k_of_n(workers: int, options: dict[str, int], lane: str) -> None:
    """2 of 3, 4 of 2 (each worker gives two deltas, both from where the round began), 1 of 2."""

    def recipe(job: Job) -> Returned:
        training = constant(model_of(seed=job.index + 3))
        job.prepare(training.model, training.optimizer)
        for number in job.ctx.steps(6):
            training.step(job.index, number)
        job.ctx.barrier()
        return {"model": weights(training.model)}

    want, _ = reference(constant, options["replicas_to_aggregate"], 6, 2)
    got, summary = run_cluster(recipe, workers, mode="local", local_steps=2, ps=2, lane=lane, **options)
    assert summary["global_step"] == 6
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")


@pytest.mark.parametrize("outer", ["sync", "async"])
@pytest.mark.parametrize("ps", [1, 2])
def test_steps_ends_at_exactly_so_many_outer_updates(ps: int, outer: str) -> None:
    made = [0, 0]

    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        for number in job.ctx.steps(7):
            training.step(job.index, number)
            made[job.index] += 1
        assert job.ctx.global_step <= 7
        return {}

    _, summary = run_cluster(recipe, 2, mode="local", local_steps=3, outer=outer, ps=ps)
    assert summary["global_step"] == 7
    assert made == [21, 21] if outer == "sync" else sum(made) >= 21
    assert [row["steps"] for row in summary["workers"]] == made


def test_a_worker_that_is_stopped_before_its_exchange_adds_no_update() -> None:
    """K is 1: worker 0 makes the one update while worker 1 is between two steps. What worker 1 has is too late."""
    began, ended = threading.Event(), threading.Event()
    made = [0, 0]

    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        for number in job.ctx.steps(1):
            if job.index == 0:
                assert began.wait(30)
            training.step(job.index, number)
            made[job.index] += 1
            if job.index == 1:
                began.set()
                assert ended.wait(30)
        ended.set()
        return {}

    _, summary = run_cluster(recipe, 2, mode="local", local_steps=2, replicas_to_aggregate=1, ps=2)
    assert made == [2, 2]
    assert summary["global_step"] == 1
    assert [row["discarded"] for row in summary["workers"]] == [0, 1]


# --- parameters come and go -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before prepare", "after prepare", "in assign"])
def test_loading_before_the_first_step(when: str) -> None:
    """The chief's loaded values are the cluster's, and deltas count from them."""
    saved = weights(model_of(seed=55))

    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        if when == "before prepare":
            training.model.load_state_dict(saved)
        job.prepare(training.model, training.optimizer)
        if when == "after prepare":
            training.model.load_state_dict(saved)
        elif when == "in assign":
            with job.ctx.assign():
                training.model.load_state_dict(saved)
        job.ctx.barrier()
        for number in range(8):
            training.step(job.index, number)
        return {"model": weights(training.model)}

    want, _ = reference(adamw, 2, 2, 4, seed=55)
    got, _ = run_cluster(recipe, 2, mode="local", local_steps=4, ps=2, lane="shm", save_every="none")
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")


def test_deltas_count_from_what_was_loaded() -> None:
    """No pull and no barrier in between: the first delta must not hold the difference of the two models."""
    saved = weights(model_of(seed=55))

    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        training.model.load_state_dict(saved)
        for number in range(4):
            training.step(0, number)
        return {"model": weights(training.model)}

    want, _ = reference(adamw, 1, 2, 2, seed=55)
    got, _ = run_cluster(recipe, 1, mode="local", local_steps=2, ps=2, save_every="none")
    assert_same(want, got[0]["model"], "worker 0")


def test_a_copy_of_model_and_optimizer_trains_on_its_own() -> None:
    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        training.step(0, 0)
        before = weights(training.model)
        apart = copy.deepcopy(training)
        for number in range(3):
            apart.step(0, number)
        assert job.ctx.global_step == 0
        assert job.ctx._session.training_step.steps == 1
        assert_same(before, weights(training.model), "the model that was copied")
        assert not torch.equal(before["0.weight"], weights(apart.model)["0.weight"])
        return {}

    run_cluster(recipe, 1, mode="local", local_steps=2, ps=1)


def test_a_loaded_optimizer_is_the_workers_own() -> None:
    """Before or after prepare: it never goes to the ps."""
    model = model_of()
    give(model, drawn(model, 1))
    warm = Adam(model.parameters(), lr=0.01)
    warm.step()
    state = copy.deepcopy(warm.state_dict())

    def recipe(job: Job) -> Returned:
        training = Training(model_of(), lambda p: Adam(p, lr=0.01))
        job.prepare(training.model, training.optimizer)
        training.optimizer.load_state_dict(copy.deepcopy(state))
        assert_same(state, training.optimizer.state_dict(), "loaded")
        for number in range(4):
            training.step(job.index, number)
        return {"model": weights(training.model)}

    def make(model: nn.Module) -> Training:
        training = Training(model, lambda p: Adam(p, lr=0.01))
        training.optimizer.load_state_dict(copy.deepcopy(state))
        return training

    want, _ = reference(make, 1, 2, 2)
    got, _ = run_cluster(recipe, 1, mode="local", local_steps=2, ps=1, save_every="none")
    assert_same(want, got[0]["model"], "worker 0")


@pytest.mark.parametrize("lane", LANES)
def test_after_the_end_the_model_is_what_the_checkpoint_holds(lane: str, tmp_path: Path) -> None:
    """The two steps after the last exchange are in it too; whoever ends has the common parameters."""
    models: dict[int, nn.Module] = {}

    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        for number in range(10):
            training.step(job.index, number)
        models[job.index] = training.model
        return {}

    run_cluster(recipe, 2, mode="local", local_steps=4, ps=2, lane=lane, run_dir=str(tmp_path))
    want, _ = reference(adamw, 2, 2, 4, rest=2)
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    assert folder.name == "step-00000003"
    assert_same(want, load_file(folder / "model.safetensors"), "checkpoint")
    for model in models.values():
        assert_same(want, _own(model), "after the end")


def _own(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the tensors hold, without a word to anybody."""
    return {f"{n}.{k}": p.detach() for n, m in model._modules.items() for k, p in m._parameters.items()}


def test_between_two_exchanges_a_pull_keeps_the_workers_own_steps() -> None:
    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        start = weights(training.model)
        training.step(0, 0)
        own = weights(training.model)
        job.ctx.pull()
        assert_same(own, weights(training.model), "after pull")
        assert not torch.equal(start["0.weight"], own["0.weight"])
        assert job.ctx.global_step == 0
        training.step(0, 1)
        assert job.ctx.global_step == 1
        with torch.no_grad():
            training.model[0].weight.fill_(9.0)
        job.ctx.pull()  # at an exchange there is nothing of its own to lose
        assert not (training.model[0].weight == 9.0).all()
        return {}

    run_cluster(recipe, 1, mode="local", local_steps=2, ps=2)


@pytest.mark.parametrize("lane", LANES)
def test_a_delta_that_is_not_finite_is_discarded_and_the_worker_starts_again(lane: str) -> None:
    """Its parameters are the common ones again and its optimizer has forgotten what was not finite either."""

    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        for number in range(2):
            training.step(job.index, number)
        before = weights(training.model)
        training.step(job.index, 2)
        gradients(training.model, batch(job.index, 3))
        training.model[4].bias.grad.fill_(float("nan"))
        training.optimizer.step()
        assert_same(before, weights(training.model), "after the discarded one")
        assert job.ctx.global_step == 1
        for number in (4, 5):
            training.step(job.index, number)
        assert job.ctx.global_step == 2
        assert all(bool(v.isfinite().all()) for v in weights(training.model).values())
        return {}

    with pytest.warns(UserWarning, match=r"worker:0: step 4 discarded, gradient not finite in 4\.bias$"):
        _, summary = run_cluster(recipe, 1, mode="local", local_steps=2, ps=2, lane=lane)
    assert summary["workers"][0]["discarded"] == 1
    assert summary["ps"][0]["not_finite"] == {"0": 1}


def test_without_a_cluster_local_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--mode", "local"])
    for name in ("TF_CONFIG", "PACELINE_TASK"):
        monkeypatch.delenv(name, raising=False)
    ctx = paceline.init()
    plain, ours = adamw(model_of()), adamw(model_of())
    ctx.prepare(ours.model, ours.optimizer)
    for number in range(5):
        plain.step(0, number)
        ours.step(0, number)
    assert_same(weights(plain.model), weights(ours.model), "alone")


def test_what_a_worker_loads_without_leave_is_gone() -> None:
    """Two workers load ones; only the chief may, before the first step. The other's values are no delta."""

    def recipe(job: Job) -> Returned:
        model = job.make(lambda: nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        job.prepare(model, optimizer)
        if job.index == 1:
            model.load_state_dict({name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()})
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        job.ctx.barrier()
        return {name: value.clone() for name, value in model.state_dict().items()}

    returned, _ = run_cluster(recipe, 2, mode="local", local_steps=2)
    want = Job.make(lambda: nn.Linear(3, 2)).state_dict()
    for got in returned:
        assert all(torch.equal(got[name], value) for name, value in want.items())


def test_steps_after_the_last_exchange_are_pushed_at_the_end() -> None:
    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        for number in range(5):
            training.step(job.index, number)
        return {}

    _, summary = run_cluster(recipe, 1, mode="local", local_steps=2)
    assert summary["global_step"] == 3
    assert summary["workers"][0]["steps"] == 5


def test_the_outer_momentum_follows_the_outer_mode() -> None:
    """Stale deltas and momentum destroy a model: a switch to outer async takes it away, unless it was asked for."""
    told: dict[str, list[object]] = {}

    def recipe(job: Job) -> Returned:
        training = adamw(model_of())
        job.prepare(training.model, training.optimizer)
        for number in range(6):
            if number == 2:
                job.ctx.switch_mode("local", outer="async", local_steps=1)
            training.step(job.index, number)
            group = job.ctx._session.training_step.spec.groups[0]
            told.setdefault(job.ctx._session.training_step.client.dial.spec.outer, []).append(
                (group["momentum"], group["nesterov"])
            )
        return {}

    run_cluster(recipe, 1, mode="local", local_steps=1)
    assert set(told["sync"]) == {(0.9, True)}
    assert told["async"][-1] == (0.0, False)
