"""What a Keras script does around its steps: graphs, reads, clones, files, data, faults. As in plain Keras, all of it.

The steps themselves are in test_keras.
"""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import paceline
from paceline.cluster.spec import Task
from paceline.errors import NonFiniteGradient, PacelineError, TrainingFailed, UsageError
from paceline.worker.context import Context
from paceline.worker.session import WorkerSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
A_STEP = 1e-6


@pytest.fixture(scope="module")
def k(tensorflow: None) -> Any:
    """The toy model, plain and on a cluster; importing it imports TensorFlow."""
    return import_module("keras_cluster")


def alone(k: Any, work: Any, **options: Any) -> dict[str, Any]:
    """One worker that does `work(ctx)`."""
    summary: dict[str, Any] = paceline.launch(work, ps=1, workers=1, **options)
    return summary


def test_an_answer_is_never_written_into_a_graph(k: Any) -> None:
    """An eager loop has an answer on its way when the script's own graph calls the model for the first time."""

    def script(model: Any, optimizer: Any) -> tuple[Any, Any]:
        look = k.tf.function(lambda x: model(x, training=False))
        k.train(model, optimizer, "eager", range(3), is_read=False)
        first = look(k.X[0]).numpy()
        k.train(model, optimizer, "eager", range(3, 6), is_read=False)
        return first, look(k.X[0]).numpy()

    got: list[Any] = []
    alone(k, lambda ctx: got.extend(script(*ctx.prepare(k.model_of(), k.keras.optimizers.SGD(0.1)))))
    assert k.apart(got, script(k.model_of(), k.keras.optimizers.SGD(0.1))) < A_STEP * k.STEPS


def test_what_fit_kept_from_before_prepare_is_made_anew(k: Any) -> None:
    def work(ctx: Any) -> None:
        model, optimizer = k.model_of(), k.keras.optimizers.SGD(0.1)
        data = k.tf.data.Dataset.from_tensor_slices((k.X[:2], k.Y[:2]))
        model.compile(optimizer=optimizer, loss=k.LOSS)
        model.fit(data, verbose=0)
        ctx.prepare(model, optimizer)
        model.fit(data, verbose=0)
        assert ctx.global_step == 2

    assert alone(k, work)["global_step"] == 2


def test_torch_and_keras_share_adamw(k: Any) -> None:
    import torch

    names = {"t/a/kernel": ("0.weight", (1, 0)), "t/a/bias": "0.bias"}
    seen: dict[int, Any] = {}

    def work(ctx: Any) -> None:
        if ctx.is_chief:
            own = torch.nn.Sequential(torch.nn.Linear(5, 3))
            own, optimizer = ctx.prepare(own, torch.optim.AdamW(own.parameters(), lr=0.1, weight_decay=0.004, eps=1e-7))
            own(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            ctx.barrier()
            ctx.pull()
            seen[0] = own[0].weight.detach().numpy().copy()
            return
        with k.LOCK:
            model = k.keras.Sequential([k.keras.Input((5,)), k.keras.layers.Dense(3, name="a")], name="t")
        model, optimizer = ctx.prepare(model, k.keras.optimizers.AdamW(0.1), names=names)
        with k.tf.GradientTape() as tape:
            loss = k.tf.reduce_mean(model(k.tf.ones((2, 5))) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        ctx.barrier()
        ctx.pull()
        seen[1] = model.get_weights()[0].T

    summary = paceline.launch(work, ps=1, workers=2)
    assert summary["global_step"] == 2
    assert np.array_equal(seen[0], seen[1])


@pytest.mark.parametrize("excluded", [None, "bias"])
def test_weight_decay_may_change_to_and_from_nothing(k: Any, excluded: str | None) -> None:
    def script(model: Any, optimizer: Any) -> Any:
        for step, decay in enumerate((0.0, 0.1, 0.2, 0.0)):
            optimizer.weight_decay = decay
            k.train(model, optimizer, "eager", range(step, step + 1))
        return [np.array(w) for w in model.get_weights()]

    def made() -> Any:
        optimizer = k.keras.optimizers.AdamW(0.02, weight_decay=0.0)
        if excluded is not None:
            optimizer.exclude_from_weight_decay(var_names=[excluded])
        return optimizer

    got: list[Any] = []
    alone(k, lambda ctx: got.extend(script(*ctx.prepare(k.model_of(), made()))))
    assert k.apart(got, script(k.model_of(), made())) < 4 * A_STEP


def test_workers_keep_one_order_over_several_passes(k: Any) -> None:
    """Five batches for two workers: the last round is short, and a shuffled set has another order in every pass. They
    read as far as they must, as fit does; what TensorFlow would read ahead of them is a matter of luck."""
    from paceline.frameworks.keras.data import share

    def passes(worker: int) -> list[list[int]]:
        data = k.tf.data.Dataset.range(10).shuffle(10, seed=4).batch(2)
        options = k.tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        shared = share(data.with_options(options), worker, 2, "shard", lambda line: None)
        assert int(shared.cardinality()) == 3
        return [[int(n) for _, batch in zip(range(3), shared, strict=False) for n in batch] for _ in range(3)]

    for first, second in zip(passes(0), passes(1), strict=True):
        assert set(first) | set(second) == set(range(10))
        assert not set(first[:4]) & set(second[:4])


SETS = {
    "single": lambda tf: tf.data.Dataset.range(5),
    "tuple of one": lambda tf: tf.data.Dataset.range(5).map(lambda n: (n,)),
    "nothing beside": lambda tf: tf.data.Dataset.range(5).map(lambda n: (n, None)),
    "pairs": lambda tf: tf.data.Dataset.range(5).map(lambda n: (n, {"twice": 2 * n})),
    "dict": lambda tf: tf.data.Dataset.range(5).map(lambda n: {"n": n, "twice": 2 * n}),
    "unknown length": lambda tf: tf.data.Dataset.range(10).filter(lambda n: n < 5),
    "ragged": lambda tf: tf.data.Dataset.range(5).map(lambda n: tf.RaggedTensor.from_row_lengths([n, n, n], [1, 2])),
    "sparse": lambda tf: tf.data.Dataset.range(5).map(lambda n: tf.SparseTensor([[0, 0]], [n], [2, 2])),
}


@pytest.mark.parametrize("kind", SETS)
def test_sets_of_every_shape_are_shared_out(k: Any, kind: str) -> None:
    from paceline.frameworks.keras.data import share

    def first_number(element: Any) -> int:
        flat = k.tf.nest.flatten(element, expand_composites=False)[0]
        return int(np.asarray(getattr(flat, "values", flat)).reshape(-1)[0])

    whole = SETS[kind](k.tf)
    shared = [share(whole, i, 2, "shard", lambda line: None) for i in range(2)]
    parts = [[first_number(element) for element in part] for part in shared]
    assert all(part.element_spec == whole.element_spec for part in shared)
    assert parts == [[0, 2, 4], [1, 3, 4]]


def test_a_clone_is_a_model_of_its_own(k: Any) -> None:
    """A functional model's clone is made of the class of the prepared one."""

    def work(ctx: Any) -> None:
        inputs = k.keras.Input((37,))
        model = k.keras.Model(inputs, k.keras.layers.Dense(3)(inputs))
        model, optimizer = ctx.prepare(model, k.keras.optimizers.SGD(0.1))
        k.train(model, optimizer, "eager", range(1))
        before = model.get_weights()
        clone = k.keras.models.clone_model(model)
        clone.compile("sgd", loss=k.LOSS)
        clone.set_weights([w + 1 for w in before])
        clone.fit(k.X[0], k.Y[0], verbose=0)
        assert k.apart(model.get_weights(), before) == 0, "what the clone is given is the clone's"
        copied = type(optimizer).from_config(optimizer.get_config())
        copied.apply([k.tf.ones_like(v) for v in clone.trainable_variables], clone.trainable_variables)
        assert ctx.global_step == (0 if ctx.mode == "local" else 1)

    alone(k, work, mode="local", local_steps=3)
    alone(k, work)


def test_an_error_of_tensorflow_is_not_replaced_by_an_older_one_of_ours(k: Any) -> None:
    def work(ctx: Any) -> None:
        model, optimizer = ctx.prepare(k.model_of(), k.keras.optimizers.SGD(0.1))
        model.compile(optimizer=optimizer, loss=k.LOSS)
        with pytest.raises(NonFiniteGradient):
            model.fit(np.full((20, 37), np.nan, "float32"), np.zeros(20), batch_size=1, verbose=0)
        bad = k.tf.data.Dataset.from_tensors((k.X[0], k.Y[0])).map(
            lambda x, y: (k.tf.debugging.check_numerics(x / 0, "a set that breaks"), y)
        )
        with pytest.raises(k.tf.errors.InvalidArgumentError, match="a set that breaks"):
            model.fit(bad, verbose=0)

    with pytest.warns(UserWarning, match="not finite"):
        alone(k, work)


def test_an_evaluator_does_not_train(k: Any) -> None:
    def work(ctx: Any) -> None:
        ctx.prepare(k.model_of(), k.keras.optimizers.SGD(0.1))
        evaluator = msgspec.structs.replace(ctx._session.assignment, task=Task("evaluator", 0))
        other = Context(WorkerSession(evaluator, lambda line: None))
        model, optimizer = other.prepare(k.model_of(5), k.keras.optimizers.SGD(0.1))
        trained = k.model_of().trainable_weights
        assert k.apart(model.trainable_weights, trained) == 0
        for how in ("eager", "graph", "fit"):
            with pytest.raises(PacelineError, match="an evaluator does not train"):
                k.train(model, optimizer, how, range(1))
        assert k.apart(model.trainable_weights, trained) == 0
        other.close()

    alone(k, work)


READS = {
    "weights": lambda model: model.weights[0].numpy(),
    "trainable_variables": lambda model: model.trainable_variables[0].numpy(),
    "variables": lambda model: model.variables[0].value.numpy(),
    "layer.get_weights": lambda model: model.layers[0].get_weights()[0],
    "layer": lambda model: model.layers[0](np.ones((1, 37), "float32")).numpy(),
    "predict_on_batch": lambda model: model.predict_on_batch(np.ones((1, 37), "float32")),
    "test_on_batch": lambda model: model.test_on_batch(np.ones((1, 37), "float32"), np.zeros(1)),
}


def test_every_read_sees_the_last_step(k: Any) -> None:
    """Each read comes after a step of its own, with nothing read before."""

    def script(model: Any, optimizer: Any) -> list[Any]:
        model.compile(optimizer=optimizer, loss=k.LOSS)
        seen = []
        for step, read in enumerate(READS.values(), 3):
            k.train(model, optimizer, "eager", range(0 if step == 3 else step, step + 1), is_read=False)
            seen.append(np.array(read(model)))
        return seen

    got: list[Any] = []
    alone(k, lambda ctx: got.extend(script(*ctx.prepare(k.model_of(), k.keras.optimizers.SGD(0.1)))))
    for name, one, other in zip(READS, got, script(k.model_of(), k.keras.optimizers.SGD(0.1)), strict=True):
        assert np.abs(one - other).max() < 1e-5, name


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_chaos_nan_strikes_in_mode_local_too(k: Any, how: str) -> None:
    with pytest.warns(UserWarning, match="gradient not finite in net/first/kernel"):
        got, summary = k.on_cluster(
            lambda: k.keras.optimizers.SGD(0.1), how, mode="local", local_steps=2, chaos="nan=worker:0@3"
        )
    assert summary["workers"][0]["discarded"] == 1 and summary["global_step"] == k.STEPS // 2 - 1
    trained = [w for v, w in zip(k.model_of().weights, got, strict=True) if v.trainable]
    assert all(np.isfinite(w).all() for w in trained)


def test_a_registered_class_is_saved_under_its_own_name(k: Any, tmp_path: Path) -> None:
    @k.keras.saving.register_keras_serializable("mine")
    class Net(k.keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.inner = k.keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.inner(x)

    def work(ctx: Any) -> None:
        model = Net()
        model(k.X[0])
        model, optimizer = ctx.prepare(model, k.keras.optimizers.SGD(0.1))
        k.train(model, optimizer, "eager", range(3), is_read=False)
        model.save(tmp_path / "net.keras")
        again = k.keras.models.load_model(tmp_path / "net.keras")
        assert type(again) is Net
        assert k.apart(again.get_weights(), model.get_weights()) == 0

    alone(k, work)


@pytest.mark.parametrize("kind", ["a schedule", "by hand"])
def test_an_epoch_that_was_left_in_its_middle_does_not_set_the_learning_rate_back(
    k: Any, kind: str, tmp_path: Path
) -> None:
    """Saved in the second of two epochs of fit: the epoch begins again, the count of iterations does not."""
    seen: list[tuple[int, float]] = []
    epochs: list[int] = []
    saved = tmp_path / "a" / "checkpoints" / "step-00000009"

    def wait_for_it(batch: int, logs: Any = None) -> None:
        """At step 11: the last checkpoint, at 12, would take the place of one that is not written by then."""
        deadline = time.monotonic() + 60
        while batch == k.STEPS - 2 and len(epochs) == 2 and not saved.exists():
            assert time.monotonic() < deadline, "the announced checkpoint was never written"
            time.sleep(0.01)  # the saver's thread writes it

    def work(ctx: Any) -> None:
        decay = k.keras.optimizers.schedules.PiecewiseConstantDecay([5, 7], [0.1, 0.01, 0.001])
        optimizer = k.keras.optimizers.SGD(decay if kind == "a schedule" else 0.1)
        model, optimizer = ctx.prepare(k.model_of(), optimizer)
        model.compile(optimizer=optimizer, loss=k.LOSS)
        seen.append((int(optimizer.iterations.numpy()), float(optimizer.learning_rate)))
        data = k.tf.data.Dataset.from_tensor_slices((k.X[: k.STEPS], k.Y[: k.STEPS]))
        waits = k.keras.callbacks.LambdaCallback(on_train_batch_end=wait_for_it)
        for epoch in ctx.epochs(2):
            epochs.append(epoch)
            if kind == "by hand" and epoch:
                optimizer.learning_rate = 0.001
            model.fit(data, epochs=epoch + 1, initial_epoch=epoch, verbose=0, callbacks=[waits])

    alone(k, work, mode="sync", save_every="9", run_dir=str(saved.parent.parent))
    alone(k, work, resume=str(saved))
    (_, first), (iterations, lr) = seen
    assert first == pytest.approx(0.1)
    assert iterations in (9, 10), "a graph may count the step that is under way already"
    assert lr == pytest.approx(0.001)


@pytest.mark.parametrize("how", ["eager", "graph", "fit"])
def test_what_a_script_assigns_counts_with_one_worker(k: Any, how: str) -> None:
    """Weight clipping after every step: a callback in fit, an assign between two steps in a loop."""

    def script(model: Any, optimizer: Any) -> Any:
        def clip(*_: Any, **__: Any) -> None:
            for variable in model.trainable_variables:
                variable.assign(np.clip(variable.numpy(), -0.05, 0.05))

        if how == "fit":
            model.compile(optimizer=optimizer, loss=k.LOSS)
            data = k.tf.data.Dataset.from_tensor_slices((k.X[: k.STEPS], k.Y[: k.STEPS]))
            model.fit(data, verbose=0, callbacks=[k.keras.callbacks.LambdaCallback(on_train_batch_end=clip)])
        else:
            clip()
            for step in range(k.STEPS):
                k.train(model, optimizer, how, range(step, step + 1), is_read=False)
                clip()
        return [v.numpy() for v in model.trainable_variables]

    got: list[Any] = []
    alone(k, lambda ctx: got.extend(script(*ctx.prepare(k.model_of(), k.keras.optimizers.Adam(0.1)))))
    want = script(k.model_of(), k.keras.optimizers.Adam(0.1))
    assert k.apart(got, want) < 1e-5 and max(np.abs(each).max() for each in got) <= 0.05


def test_what_a_script_assigns_beside_other_workers_is_refused(k: Any) -> None:
    def work(ctx: Any) -> None:
        model, optimizer = ctx.prepare(k.model_of(), k.keras.optimizers.SGD(0.1))
        k.train(model, optimizer, "eager", range(1), is_read=False)
        kernel = model.trainable_variables[0]
        before = kernel.numpy()
        kernel.assign(before * 0.5)
        with pytest.raises(UsageError, match=r"first/kernel was written by the script after prepare\(\)"):
            k.train(model, optimizer, "eager", range(1, 2), is_read=False)
        kernel.assign(before)

    paceline.launch(work, ps=1, workers=2)


def test_a_fit_that_counts_from_0_again_cannot_be_resumed(k: Any, tmp_path: Path) -> None:
    """Its checkpoint goes on with ctx.epochs, or where the script says from which epoch."""
    seen: list[int] = []

    def work(epochs: int, loop: str) -> Any:
        def run(ctx: Any) -> None:
            model, optimizer = ctx.prepare(k.model_of(), k.keras.optimizers.SGD(0.01))
            model.compile(optimizer=optimizer, loss=k.LOSS)
            counts = k.keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
            common = {"batch_size": 16, "verbose": 0, "callbacks": [counts]}
            if loop == "guided":
                for epoch in ctx.epochs(epochs):
                    model.fit(k.X[0], k.Y[0], epochs=epoch + 1, initial_epoch=epoch, **common)
            elif loop == "from the epoch that the script says":
                model.fit(k.X[0], k.Y[0], epochs=epochs, initial_epoch=2, **common)
            else:
                model.fit(k.X[0], k.Y[0], epochs=epochs, **common)

        return run

    alone(k, work(2, "plain"), run_dir=str(tmp_path / "a"))
    assert seen == [0, 1]
    with pytest.raises(
        TrainingFailed, match=r"write `for epoch in ctx.epochs\(n\): model.fit\(.*test_keras_script.py, line"
    ):
        alone(k, work(3, "plain"), run_dir=str(tmp_path / "a"), resume="auto")
    for number, loop in enumerate(("guided", "from the epoch that the script says")):
        seen.clear()
        alone(k, work(3, loop), run_dir=str(tmp_path / str(number)), resume=str(tmp_path / "a"))
        assert seen == [2], loop
