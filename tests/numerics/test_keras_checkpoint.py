"""A checkpoint goes on in plain Keras: paceline.load_checkpoint gives a model and an optimizer their bits back."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HALF = 3


@pytest.fixture(scope="module")
def k(tensorflow: None) -> Any:
    """The toy model, plain and on a cluster; importing it imports TensorFlow."""
    return import_module("keras_cluster")


MADE = {
    "SGD": lambda k: k.keras.optimizers.SGD(0.02, momentum=0.9),
    "Adam": lambda k: k.keras.optimizers.Adam(0.02, amsgrad=True),
    "RMSprop": lambda k: k.keras.optimizers.RMSprop(0.02, momentum=0.9, centered=True),
    "Adagrad": lambda k: k.keras.optimizers.Adagrad(0.02),
}


def trained(k: Any, folder: Path, make: Any, **options: Any) -> list[Any]:
    """Half of the steps on a cluster; its weights, carried ones too."""
    ended: list[Any] = []

    def work(ctx: Any) -> None:
        model, optimizer = ctx.prepare(k.model_of(), make(k))
        ended[:] = k.train(model, optimizer, "eager", range(HALF))

    paceline.launch(work, ps=2, workers=1, run_dir=str(folder), **options)
    return ended


@pytest.mark.parametrize("name", MADE)
def test_one_keras_process_goes_on(k: Any, name: str, tmp_path: Path) -> None:
    left = trained(k, tmp_path, MADE[name])
    model, optimizer = k.model_of(seed=99), MADE[name](k)
    optimizer.learning_rate = 0.5
    assert paceline.load_checkpoint(tmp_path, model, optimizer) == HALF
    assert k.apart(model.get_weights(), left) == 0, "moving means are in it, too"
    assert int(optimizer.iterations.numpy()) == HALF and float(optimizer.learning_rate) == pytest.approx(0.02)
    got = k.train(model, optimizer, "eager", range(HALF, k.STEPS))
    assert k.apart(got, k.plain(lambda: MADE[name](k))) < 1e-6 * k.STEPS


@pytest.mark.parametrize("buffers", ["mean", "chief"])
@pytest.mark.parametrize(("lane", "ps"), [("shm", 2), ("tcp", 1)])
def test_two_workers_moving_statistics(k: Any, lane: str, ps: int, buffers: str, tmp_path: Path) -> None:
    """The model has their mean by samples, which ctx.weight says, or the chief's; each worker resumes with its own."""
    seen: list[list[Any]] = [[], []]

    def work(ctx: Any) -> None:
        model, optimizer = ctx.prepare(k.model_of(), MADE["SGD"](k))
        start = model.get_weights()
        ctx.barrier()
        ctx.weight(8.0 + 4 * ctx.worker_index)
        steps = 2 + 3 * ctx.worker_index if ctx._session.started_at == 0 else 0  # a resumed run shows where it begins
        seen[ctx.worker_index] = [start, k.train(model, optimizer, "eager", range(steps))]

    options: dict[str, Any] = {"ps": ps, "workers": 2, "lane": lane, "buffers": buffers, "run_dir": str(tmp_path)}
    paceline.launch(work, **options)
    (_, chief), (_, other) = seen
    model = k.model_of(seed=99)
    paceline.load_checkpoint(tmp_path, model)
    paths = [v.path for v in model.weights]
    for name in ("net/norm/moving_mean", "net/norm/moving_variance"):
        at = paths.index(name)
        mine, its = chief[at].astype(float), other[at].astype(float)
        assert np.abs(mine - its).max() > 1e-3
        wanted = ((16 * mine + 60 * its) / 76).astype("float32") if buffers == "mean" else chief[at]
        assert model.get_weights()[at].tobytes() == wanted.tobytes()
    paceline.launch(work, resume="auto", **options)
    for index, own in enumerate((chief, other)):
        for at in (paths.index("net/norm/moving_mean"), paths.index("net/norm/moving_variance")):
            assert seen[index][0][at].tobytes() == own[at].tobytes()


def test_a_model_alone_and_its_averages(k: Any, tmp_path: Path) -> None:
    left = trained(k, tmp_path, MADE["SGD"], ema=0.5)
    last, averaged = k.model_of(seed=99), k.model_of(seed=99)
    last.trainable = False  # to evaluate
    paceline.load_checkpoint(tmp_path, last)
    paceline.load_checkpoint(tmp_path, averaged, ema=True)
    assert {v.path: v.numpy().tobytes() for v in last.weights} == {
        v.path: w.tobytes() for v, w in zip(k.model_of().weights, left, strict=True)
    }
    assert k.apart(averaged.get_weights(), left) > 1e-4


def test_a_torch_run_s_checkpoint_by_names(k: Any, tmp_path: Path) -> None:
    import torch

    def work(ctx: Any) -> None:
        own = torch.nn.Sequential(torch.nn.Linear(5, 3))
        own, optimizer = ctx.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
        own(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        left.extend(p.detach().numpy().copy() for p in own.parameters())

    left: list[Any] = []
    paceline.launch(work, ps=1, workers=1, run_dir=str(tmp_path))
    model = k.keras.Sequential([k.keras.Input((5,)), k.keras.layers.Dense(3, name="a")], name="t")
    names = {"t/a/kernel": ("0.weight", (1, 0)), "t/a/bias": "0.bias"}
    assert paceline.load_checkpoint(tmp_path, model, names=names) == 1
    kernel, bias = model.get_weights()
    assert np.array_equal(kernel.T, left[0]) and np.array_equal(bias, left[1])
    with pytest.raises(UsageError, match=r"written by SGD, not by keras\.SGD: load the model alone"):
        paceline.load_checkpoint(tmp_path, model, k.keras.optimizers.SGD(0.1), names=names)
    with pytest.raises(UsageError, match="names= is for Keras models"):
        paceline.load_checkpoint(tmp_path, torch.nn.Linear(5, 3), names=names)


def test_what_does_not_fit_is_refused_in_a_sentence(k: Any, tmp_path: Path) -> None:
    trained(k, tmp_path, MADE["SGD"])
    layers = [k.keras.Input((37,)), k.keras.layers.Dense(30, name="first"), k.keras.layers.Dense(3, name="end")]
    other = k.keras.Sequential(layers, name="net")
    before = other.get_weights()
    with pytest.raises(UsageError, match=r"another model: it has no net/end/kernel, .* more \(weights go by") as caught:
        paceline.load_checkpoint(tmp_path, other)
    assert "\n" not in str(caught.value) and k.apart(other.get_weights(), before) == 0
    model = k.model_of(seed=99)
    with pytest.raises(UsageError, match=r"written by keras\.SGD, not by keras\.Adam"):
        paceline.load_checkpoint(tmp_path, model, k.keras.optimizers.Adam())
    with pytest.raises(UsageError, match="a momentum of every weight, and this optimizer is made without one"):
        paceline.load_checkpoint(tmp_path, model, k.keras.optimizers.SGD(0.1))
    assert k.apart(model.get_weights(), k.model_of(seed=99).get_weights()) == 0, "refused before anything is loaded"
    with pytest.raises(UsageError, match="is not built yet"):
        paceline.load_checkpoint(tmp_path, k.keras.Sequential([k.keras.layers.Dense(3)]))


PLAIN = """
import sys, keras, paceline
model = keras.Sequential([keras.Input((37,)), keras.layers.Dense(29, "tanh", name="first"),
    keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(3, name="last")], name="net")
print(paceline.load_checkpoint(sys.argv[1], model), "torch" in sys.modules)
"""


def test_it_imports_no_torch(k: Any, tmp_path: Path) -> None:
    trained(k, tmp_path, MADE["SGD"])
    done = subprocess.run([sys.executable, "-c", PLAIN, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(HALF), "False"], done.stderr
