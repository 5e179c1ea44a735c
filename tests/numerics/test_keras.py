"""A Keras model on the ps is plain Keras: the same numbers, eager, inside tf.function and by model.fit, in every mode.

What Keras's formulas are is also tested without Keras, in unit/test_keras_formulas.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.checkpoint.read import load_newest
from paceline.errors import TrainingFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
A_STEP = 1e-6

OPTIMIZERS = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True},
    "SGD decay": {"weight_decay": 0.1, "global_clipnorm": 0.5},
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adagrad": {},
    "RMSprop": {},
    "RMSprop centered": {"centered": True, "momentum": 0.9},
}


@pytest.fixture(scope="module")
def k(tensorflow: None) -> Any:
    """The toy model, plain and on a cluster; importing it imports TensorFlow."""
    return import_module("keras_cluster")


def maker(k: Any, name: str, lr: Any = 0.02, **options: Any) -> Any:
    made = getattr(k.keras.optimizers, name.split()[0])
    return lambda: made(lr, **{**OPTIMIZERS[name], **options})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_keras_s_own(k: Any, name: str) -> None:
    """INVARIANT: within 1e-6 a step of plain Keras, on the same numbers."""
    got, summary = k.on_cluster(maker(k, name), "graph", ps=2)
    assert k.apart(got, k.plain(maker(k, name), "graph")) < A_STEP * k.STEPS
    assert summary["global_step"] == k.STEPS


@pytest.mark.parametrize("how", ["eager", "fit"])
def test_every_way_to_train(k: Any, how: str) -> None:
    got, summary = k.on_cluster(maker(k, "Adam"), how)
    assert k.apart(got, k.plain(maker(k, "Adam"), how)) < A_STEP * k.STEPS
    assert summary["workers"][0]["steps"] == summary["global_step"] == k.STEPS


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_schedule_travels_with_the_push(k: Any, how: str) -> None:
    def make() -> Any:
        return maker(k, "SGD", k.keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5))()

    got, _ = k.on_cluster(make, how)
    assert k.apart(got, k.plain(make, how)) < A_STEP * k.STEPS
    assert k.apart(got, k.plain(maker(k, "SGD", 0.2), how)) > 1e-3, "a schedule that is ignored would be seen"


MODES = {
    "async tcp": {"mode": "async", "lane": "tcp", "ps": 3},
    "sync shm": {"mode": "sync", "lane": "shm", "ps": 2},
    "1 of 2": {"mode": "sync", "replicas_to_aggregate": 1},
    "bounded": {"mode": "bounded", "staleness": 1, "placement": "round_robin", "ps": 2},
    "local": {"mode": "local", "local_steps": 2},
    "bfloat16": {"mode": "sync", "wire": "bfloat16", "lane": "tcp"},
}


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "graph") for name in MODES), ("async tcp", "eager"), ("local", "eager")]
)
def test_two_workers_in_every_mode(k: Any, name: str, how: str) -> None:
    options = MODES[name]
    got, summary = k.on_cluster(maker(k, "SGD"), how, workers=2, **options)
    assert all(np.isfinite(w).all() for w in got)
    assert k.apart(got, k.model_of().get_weights()) > 1e-3
    pushes = sum(w["steps"] for w in summary["workers"])
    discarded = sum(w["discarded"] for w in summary["workers"])
    assert pushes == 2 * k.STEPS
    updates = {"sync shm": k.STEPS, "bfloat16": k.STEPS, "local": k.STEPS // 2, "1 of 2": pushes - discarded}
    assert summary["global_step"] == updates.get(name, pushes)
    if name in ("sync shm", "bfloat16"):
        mean = on_the_mean(k, maker(k, "SGD"), wire=options.get("wire", "float32"))
        assert k.apart(trained(k, got), mean) < A_STEP * k.STEPS
        is_narrow = k.apart(trained(k, got), on_the_mean(k, maker(k, "SGD"))) > A_STEP * k.STEPS
        assert is_narrow == ("wire" in options)


def trained(k: Any, weights: list[Any]) -> list[Any]:
    return [w for v, w in zip(k.model_of().weights, weights, strict=True) if v.trainable]


def on_the_mean(k: Any, make: Any, wire: str = "float32") -> list[Any]:
    """What one process trains that steps on the mean of two workers' gradients, each rounded as it travels."""
    model, optimizer = k.model_of(), make()
    for step in range(k.STEPS):
        gradients = []
        for index in (step, k.STEPS + step):
            with k.tf.GradientTape() as tape:
                loss = k.LOSS(k.Y[index], model(k.tf.constant(k.X[index]), training=True))
            whole = tape.gradient(loss, model.trainable_variables)
            gradients.append([k.tf.cast(k.tf.cast(g, wire), g.dtype) for g in whole])
        optimizer.apply([(a + b) / 2 for a, b in zip(*gradients, strict=True)], model.trainable_variables)
    return trained(k, model.get_weights())


def test_sync_is_one_process_on_the_mean(k: Any) -> None:
    got, _ = k.on_cluster(maker(k, "SGD nesterov"), "eager", workers=2, mode="sync", ps=2)
    assert k.apart(trained(k, got), on_the_mean(k, maker(k, "SGD nesterov"))) < A_STEP * k.STEPS


def test_local_with_one_worker_is_its_outer_step(k: Any) -> None:
    """H steps of plain Keras, then the ps moves by outer SGD: lr 1 without momentum is the worker's own step."""
    got, summary = k.on_cluster(
        maker(k, "Adam"), "graph", mode="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0
    )
    assert k.apart(got, k.plain(maker(k, "Adam"), "graph")) < A_STEP * k.STEPS
    assert summary["global_step"] == k.STEPS // 2


def test_no_gradient_is_not_zero(k: Any) -> None:
    """A weight without a gradient keeps its value and its momentum, but Keras's count of iterations goes on."""

    def make() -> Any:
        return k.keras.optimizers.Adam(0.02)

    def some(model: Any, optimizer: Any) -> list[Any]:
        for step in range(4):
            with k.tf.GradientTape() as tape:
                loss = k.LOSS(k.Y[step], model(k.tf.constant(k.X[step]), training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            if step in (1, 2):
                gradients[0] = None
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return [np.array(w) for w in model.get_weights()]

    got: list[Any] = []
    paceline.launch(lambda ctx: got.extend(some(*ctx.prepare(k.model_of(), make()))), ps=1, workers=1)
    assert k.apart(got, some(k.model_of(), make())) < 4 * A_STEP


def test_weights_loaded_before_the_first_step_are_the_cluster_s(k: Any) -> None:
    first, seen = [w + 1 for w in k.model_of().get_weights()], {}

    def work(ctx: Any) -> None:
        model, optimizer = ctx.prepare(k.model_of(), maker(k, "SGD", 0.0)())
        if ctx.is_chief:
            model.set_weights(first)
        ctx.barrier()
        k.train(model, optimizer, "eager", range(1))
        ctx.pull()
        seen[ctx.worker_index] = {v.path: v.numpy() for v in model.trainable_weights}

    paceline.launch(work, ps=1, workers=2)
    for path, value in seen[1].items():
        assert np.array_equal(value, seen[0][path])
    assert np.array_equal(seen[0]["net/first/bias"], np.ones(29, "float32"))


def test_a_checkpoint_resumes_and_others_read_it(k: Any, tmp_path: Path) -> None:
    """6 steps at once are 3, a checkpoint, and 3 more; and the file is what any program of safetensors reads."""

    def work(part: range) -> Any:
        def run(ctx: Any) -> None:
            model, optimizer = ctx.prepare(k.model_of(), maker(k, "Adam")())
            ended[:] = k.train(model, optimizer, "graph", part)

        return run

    ended: list[Any] = []
    paceline.launch(work(range(3)), ps=2, workers=1, run_dir=str(tmp_path / "a"))
    newest = load_newest(tmp_path / "a" / "checkpoints", print)
    assert newest is not None and newest.state.optimizer == "keras.Adam"
    assert newest.model["net/first/kernel"].shape == (37, 29)
    assert np.array_equal(np.frombuffer(newest.model["net/first/kernel"].data, "float32").reshape(37, 29), ended[0])
    paceline.launch(work(range(3, 6)), ps=1, workers=1, run_dir=str(tmp_path / "b"), resume=str(tmp_path / "a"))
    assert k.apart(ended, k.plain(maker(k, "Adam"), "graph")) < A_STEP * 6


def test_torch_and_keras_read_each_other_s_checkpoints(k: Any, tmp_path: Path) -> None:
    import torch

    names = {"t/a/kernel": ("0.weight", (1, 0)), "t/a/bias": "0.bias"}
    seen: dict[str, Any] = {}

    def keras_work(ctx: Any) -> None:
        with k.LOCK:
            model = k.keras.Sequential([k.keras.Input((5,)), k.keras.layers.Dense(3, name="a")], name="t")
        model, optimizer = ctx.prepare(model, k.keras.optimizers.SGD(0.1, momentum=0.9), names=names)
        seen["keras got"] = model.get_weights()
        with k.tf.GradientTape() as tape:
            loss = k.tf.reduce_mean(model(k.tf.ones((2, 5))) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        seen["keras left"] = model.get_weights()

    def torch_work(ctx: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(5, 3))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        seen["torch got"] = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        seen["torch left"] = {n: p.detach().numpy().copy() for n, p in model.state_dict().items()}

    paceline.launch(keras_work, ps=1, workers=1, run_dir=str(tmp_path / "a"))
    paceline.launch(torch_work, ps=2, workers=1, run_dir=str(tmp_path / "b"), resume=str(tmp_path / "a"))
    assert np.array_equal(seen["torch got"]["0.weight"], seen["keras left"][0].T)
    assert np.array_equal(seen["torch got"]["0.bias"], seen["keras left"][1])
    paceline.launch(keras_work, ps=1, workers=1, run_dir=str(tmp_path / "c"), resume=str(tmp_path / "b"))
    assert np.array_equal(seen["keras got"][0], seen["torch left"]["0.weight"].T)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 3))
    assert paceline.load_checkpoint(tmp_path / "c", plain, torch.optim.SGD(plain.parameters(), lr=1.0)) == 3
    assert np.array_equal(plain[0].weight.detach().numpy(), seen["keras left"][0].T)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_ctx_gives_to_torch_it_gives_to_keras(k: Any, mode: str) -> None:
    """steps, ema, assign, kv; and a gradient that is not finite is discarded and named."""
    seen: dict[int, tuple[Any, ...]] = {}

    def work(ctx: Any) -> None:
        model, optimizer = ctx.prepare(k.model_of(), maker(k, "SGD", 0.05)())
        for number in ctx.steps(10):
            k.train(model, optimizer, "eager", range(number % k.STEPS, number % k.STEPS + 1))
        own = model.get_weights()[0].copy()
        with ctx.ema():
            average = model.get_weights()[0].copy()
        back = model.get_weights()[0].copy()
        with ctx.assign():
            model.set_weights([w * 0 + 2 for w in model.get_weights()])
        seen[ctx.worker_index] = own, average, back, model.get_weights()[0], ctx.kv["net/last/bias"], ctx.global_step

    with pytest.warns(UserWarning, match="worker:0: step 2 discarded, gradient not finite in net/first/kernel"):
        paceline.launch(work, workers=2, mode=mode, ema=0.9, ps=2, lane="tcp", chaos="nan=worker:0@2")
    for own, average, back, assigned, bias, global_step in seen.values():
        assert np.abs(own - average).max() > 1e-3 and np.array_equal(own, back)
        assert (assigned == 2).all() and (np.asarray(bias) == 2).all() and global_step == 10


def test_tf_data_is_shared_out(k: Any) -> None:
    """Every n-th batch, the last round filled by wrapping; with data="full" everything."""
    taken: dict[tuple[str, int], list[int]] = {}

    def work(ctx: Any) -> None:
        data = k.tf.data.Dataset.range(10).shuffle(10, seed=4).batch(2)
        model, optimizer, shared = ctx.prepare(k.model_of(), maker(k, "SGD")(), data)
        taken[ctx._session.assignment.settings.data, ctx.worker_index] = [int(n) for batch in shared for n in batch]
        k.train(model, optimizer, "eager", range(1))

    for data in ("shard", "full"):
        paceline.launch(work, ps=1, workers=2, data=data)
    first, second = taken["shard", 0], taken["shard", 1]
    assert len(first) == len(second) == 6
    assert set(first) | set(second) == set(range(10))
    assert len(set(first[:4]) & set(second[:4])) == 0
    assert sorted(taken["full", 0]) == sorted(taken["full", 1]) == list(range(10))


BAD = {
    "its formulas are not known there. These are: SGD, Adam": lambda k: (k.model_of(), k.keras.optimizers.Nadam(0.1)),
    "is not built yet": lambda k: (k.keras.Sequential([k.keras.layers.Dense(3)]), k.keras.optimizers.SGD(0.1)),
    "all of its 3 weights are non-trainable state": lambda k: (
        k.keras.Sequential([k.keras.Input((4,)), k.keras.layers.Normalization()]),
        k.keras.optimizers.SGD(0.1),
    ),
    "the ps keep averages with --ema": lambda k: (k.model_of(), k.keras.optimizers.SGD(0.1, use_ema=True)),
    "not a builtins str": lambda k: (k.model_of(), "sgd"),
    "needs the optimizer in the same call": lambda k: (k.model_of(),),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_input_is_one_sentence(k: Any, said: str) -> None:
    with pytest.raises(TrainingFailed) as raised:
        paceline.launch(lambda ctx: ctx.prepare(*BAD[said](k)), ps=1, workers=1)
    assert said in str(raised.value.__cause__) and "\n" not in str(raised.value.__cause__)


def test_keras_on_jax_is_refused(k: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k.keras.backend, "backend", lambda: "jax")
    with pytest.raises(TrainingFailed, match="Keras runs on jax here: paceline trains Keras models on tensorflow and"):
        paceline.launch(lambda ctx: ctx.prepare(k.model_of(), maker(k, "SGD")()), ps=1, workers=1)


def test_another_optimizer_in_compile_is_refused(k: Any) -> None:
    def work(ctx: Any) -> None:
        model, _ = ctx.prepare(k.model_of(), maker(k, "SGD")())
        model.compile(optimizer="sgd", loss=k.LOSS)

    with pytest.raises(TrainingFailed, match="another optimizer than prepare"):
        paceline.launch(work, ps=1, workers=1)


def test_other_layouts_and_other_optimizers_are_refused(k: Any) -> None:
    """Mixed workers: the diff of what one trains and the other does not."""
    import torch

    def work(names: dict[str, Any], optimizer: str) -> Any:
        def run(ctx: Any) -> None:
            if ctx.worker_index == 1:
                with k.LOCK:
                    model = k.keras.Sequential([k.keras.Input((5,)), k.keras.layers.Dense(3, name="a")], name="t")
                made = getattr(k.keras.optimizers, optimizer)(0.1)
                ctx.prepare(model, made, names=names)
            else:
                own = torch.nn.Sequential(torch.nn.Linear(5, 3))
                ctx.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))

        return run

    for names, optimizer, said in (
        ({"t/a/kernel": "0.weight", "t/a/bias": "0.bias"}, "SGD", r"~ 0.weight: here float32\[(3, 5|5, 3)\]"),
        ({"t/a/kernel": ("0.weight", (1, 0)), "t/a/bias": "0.bias"}, "Adam", "give all workers the same one"),
        ({"t/a/kernal": "0.weight"}, "SGD", "did you mean t/a/kernel"),
        ({"t/a/kernel": ("0.weight", (1, 0))}, "SGD", "say what the cluster calls t/a/bias, too"),
    ):
        with pytest.raises(TrainingFailed, match=said):
            paceline.launch(work(names, optimizer), ps=1, workers=2, wait_s=20.0)
