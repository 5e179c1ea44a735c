"""Constraints of Keras variables are kept by the ps: its own `kernel_constraint=`, and those of paceline.constrain."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.errors import TrainingFailed, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
A_STEP = 1e-6


@pytest.fixture(scope="module")
def k(tensorflow: None) -> Any:
    return import_module("keras_cluster")


CONSTRAINTS = {
    "NonNeg": lambda c: c.NonNeg(),
    "MaxNorm": lambda c: c.MaxNorm(0.3),
    "MaxNorm of rows": lambda c: c.MaxNorm(0.2, axis=1),
    "MinMaxNorm": lambda c: c.MinMaxNorm(0.3, 0.5, rate=0.7, axis=[0]),
    "UnitNorm of all": lambda c: c.UnitNorm(axis=[0, 1]),
    "constrain min max": {"min": -0.05, "max": 0.02},
    "constrain max_norm": {"max_norm": 0.3},
}


def model_of(k: Any, said: Any) -> Any:
    """Both kernels and one bias are constrained; the model is made as the toy model is."""
    with k.LOCK:
        k.keras.utils.set_random_seed(3)
        own = said(k.keras.constraints) if callable(said) else None
        first = k.keras.layers.Dense(29, "tanh", name="first", kernel_constraint=own)
        last = k.keras.layers.Dense(3, name="last", kernel_constraint=own, bias_constraint="non_neg")
        model = k.keras.Sequential([k.keras.Input((37,)), first, last], name="net")
    if own is None:
        paceline.constrain([first.kernel, last.kernel], **said)
    return model


def trained(k: Any, monkeypatch: pytest.MonkeyPatch, name: str, how: str, **options: Any) -> tuple[Any, Any]:
    monkeypatch.setattr(k, "model_of", lambda: model_of(k, CONSTRAINTS[name]))
    make = lambda: k.keras.optimizers.SGD(0.3, momentum=0.9)  # noqa: E731
    return k.on_cluster(make, how, **options)[0], k.plain(make, how)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_step_is_keras_s_own(k: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """INVARIANT: within 1e-6 a step of plain Keras, on the same numbers."""
    got, want = trained(k, monkeypatch, name, "graph", ps=3)
    assert k.apart(got, want) < 3 * A_STEP * k.STEPS
    monkeypatch.undo()
    monkeypatch.setattr(k, "model_of", lambda: model_of(k, {"max": 100.0}))
    assert k.apart(got, k.plain(lambda: k.keras.optimizers.SGD(0.3, momentum=0.9))) > 1e-3, "it would be seen"


@pytest.mark.parametrize("how", ["eager", "fit"])
def test_every_way_to_train(k: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got, want = trained(k, monkeypatch, "MaxNorm", how)
    assert k.apart(got, want) < 3 * A_STEP * k.STEPS


def test_two_workers_and_local(k: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the outer update, too, which moves beyond the mean of what the workers have."""
    for options in ({"mode": "sync"}, {"mode": "local", "local_steps": 2, "outer_lr": 1.9}):
        got, _ = trained(k, monkeypatch, "constrain min max", "graph", workers=2, ps=2, **options)
        kernels = [w for w in got if w.ndim == 2]
        assert all(w.min() == np.float32(-0.05) and w.max() == np.float32(0.02) for w in kernels), options


def test_what_a_ps_does_not_know_is_refused(k: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rounded(k.keras.constraints.Constraint):  # type: ignore[misc]
        def __call__(self, w: Any) -> Any:
            return k.keras.ops.round(w)

    monkeypatch.setitem(CONSTRAINTS, "own", lambda c: Rounded())
    with pytest.raises(TrainingFailed, match="first/kernel has the constraint Rounded, which a ps does not know"):
        trained(k, monkeypatch, "own", "graph")
    got, want = trained(k, monkeypatch, "own", "graph", mode="local", local_steps=1, outer_lr=1.0, outer_momentum=0.0)
    assert k.apart(got, want) < A_STEP * k.STEPS


def test_wrong_arguments_are_refused(k: Any) -> None:
    models: list[Any] = []

    def run(ctx: Any) -> None:
        model = model_of(k, {"min": 0.0})
        kernel, bias = model.weights[:2]
        for parameter, options, said in (
            (kernel, {"min": 1.0}, r"it has a constraint already \(min=0.0\)"),
            (bias, {"max_norm": 1.0}, "this tensor has no rows"),
            (model.weights[3], {"min": 1.0}, r"it has a constraint already \(NonNeg\)"),
            ([kernel, "kernel"], {"min": 0.0}, "takes variables, not a str"),
        ):
            with pytest.raises(UsageError, match=said):
                paceline.constrain(parameter, **options)
        ctx.prepare(model, k.keras.optimizers.SGD(0.1))
        paceline.constrain(kernel, min=0.0)  # as before
        models.append(model)
        with pytest.raises(UsageError, match=r"first/bias: this comes after prepare\(\)"):
            paceline.constrain(bias, min=0.0)

    paceline.launch(run, ps=1, workers=1, save_every="none")
    after = k.train(models[0], k.keras.optimizers.SGD(0.3), "eager", range(2))  # by Keras alone, later
    assert after[0].min() == 0.0
