"""Keras's formulas on the ps, worked out by hand for one number. That they are Keras's: numerics/test_keras."""

import math

import pytest
import torch

from paceline.server.numbers import keras
from paceline.server.numbers.optimizers import OPTIMIZERS, raw_step

LR, G1, G2 = 0.5, 2.0, -1.0


def after(optimizer: type[torch.optim.Optimizer], *gradients: float | None, **options: float) -> float:
    """Where a parameter of 1 is after these gradients."""
    parameter = torch.tensor([1.0], dtype=torch.float64)
    made = optimizer([{"params": [parameter], "lr": LR, **options}])
    for gradient in gradients:
        parameter.grad = None if gradient is None else torch.tensor([gradient], dtype=torch.float64)
        made.step()
    return parameter.item()


def test_momentum_holds_the_lr_of_its_own_time() -> None:
    assert after(keras.SGD, G1, G2) == 1 - LR * G1 - LR * G2
    m = -LR * G1
    assert after(keras.SGD, G1, G2, momentum=0.9) == pytest.approx(1 + m + (0.9 * m - LR * G2))
    ahead = 0.9 * m - LR * G1
    m2 = 0.9 * m - LR * G2
    assert after(keras.SGD, G1, G2, momentum=0.9, nesterov=True) == pytest.approx(1 + ahead + 0.9 * m2 - LR * G2)


def test_epsilon_is_where_keras_has_it() -> None:
    e = 0.25
    root = math.sqrt(1 - 0.999)
    first = LR * root / (1 - 0.9) * (0.1 * G1) / (math.sqrt(0.001 * G1 * G1) + e)
    assert after(keras.Adam, G1, epsilon=e) == pytest.approx(1 - first)
    assert after(keras.Adagrad, G1, epsilon=e) == pytest.approx(1 - LR * G1 / math.sqrt(0.1 + G1 * G1 + e))
    assert after(keras.RMSprop, G1, epsilon=e) == pytest.approx(1 - LR * G1 / math.sqrt(0.1 * G1 * G1 + e))
    centered = LR * G1 / math.sqrt(0.1 * G1 * G1 - (0.1 * G1) ** 2 + e)
    assert after(keras.RMSprop, G1, epsilon=e, centered=True) == pytest.approx(1 - centered)


def test_weights_decay_before_the_update() -> None:
    assert after(keras.SGD, G1, weight_decay=0.1) == pytest.approx(1 - 0.1 * LR - LR * G1)


def test_amsgrad_remembers_the_largest() -> None:
    assert after(keras.Adam, G1, 0.0, amsgrad=True) != after(keras.Adam, G1, 0.0)
    assert after(keras.Adam, G1, amsgrad=True) == after(keras.Adam, G1)


def test_a_step_without_a_gradient_counts_and_changes_nothing() -> None:
    """Keras's iterations are one count for all: the next bias correction is of the later step."""
    assert after(keras.Adam, None) == 1
    assert after(keras.Adam, None, G1) != after(keras.Adam, G1)


def test_an_option_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="epsilon is 'x', which is no number"):
        keras.Adam([{"params": [torch.zeros(1)], "epsilon": "x"}])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_table_steps(name: str) -> None:
    parameter = torch.ones(3)
    optimizer = OPTIMIZERS[name]([{"params": [parameter]}])  # type: ignore[call-arg]
    parameter.grad = torch.ones(3)
    with torch.no_grad():
        raw_step(name)(optimizer)
    assert bool((parameter < 1).all())
