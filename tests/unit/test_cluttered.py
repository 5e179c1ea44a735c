"""ARE the networks of documents 001 and 003, and their data, what they should be? Cluttered digits, scaling, models."""

import numpy as np
import pytest
import torch

from paceline.datasets.cluttered import CANVAS, PIECE, PIECES, cluttered
from paceline.datasets.scaling import Scaler
from paceline.models.autoencoder import Autoencoder, reconstruction_cost
from paceline.models.cnn import Cnn
from paceline.models.spatial_transformer import SpatialTransformer


def digits(count: int, ink: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Images in which every pixel is inked, so that places can be counted."""
    return np.full((count, 784), ink, np.float32), np.arange(count, dtype=np.int64) % 10


def test_the_seed_alone_decides() -> None:
    one, labels = cluttered(*digits(20), count=50, seed=5)
    again, same_labels = cluttered(*digits(20), count=50, seed=5)
    other, _ = cluttered(*digits(20), count=50, seed=6)
    assert np.array_equal(one, again) and np.array_equal(labels, same_labels) and not np.array_equal(one, other)
    assert one.shape == (50, 1, CANVAS, CANVAS) and one.dtype == np.float32 and labels.dtype == np.int64


def test_a_whole_digit_lies_on_each_canvas() -> None:
    images, _ = cluttered(*digits(3, ink=0.5), count=200, seed=1)
    inked = (images[:, 0] > 0).sum(axis=(1, 2))
    assert inked.min() >= 28 * 28 and inked.max() <= 28 * 28 + PIECES * PIECE * PIECE
    assert images.max() == 1.0, "where a piece lies under the digit both are added"
    corners = images[:, 0, 20, 20]
    assert (corners >= 0.5).all(), "whatever the place, the middle of the canvas belongs to the digit"
    assert {tuple(np.argwhere(image[0] > 0)[0]) for image in images} != {(0, 0)}


def test_the_label_is_that_of_the_digit() -> None:
    rows = np.zeros((10, 784), np.float32)
    for label in range(10):
        rows[label] = (label + 1) / 20
    images, labels = cluttered(rows, np.arange(10, dtype=np.int64), count=100, seed=2)
    for image, label in zip(images, labels, strict=True):
        values, counts = np.unique(image[image > 0], return_counts=True)
        assert round(float(values[counts.argmax()]) * 20) - 1 == label


def test_a_pixel_that_never_changes_is_not_divided_by_zero() -> None:
    rows = np.random.default_rng(0).random((100, 4)).astype(np.float32)
    rows[:, 2] = 0.25
    scaler = Scaler.measured(rows)
    there = scaler.standardised(rows)
    assert there.dtype == np.float32 and not there[:, 2].any()
    assert abs(there[:, :2].std(axis=0) - 1).max() < 1e-4 and abs(there.mean(axis=0)).max() < 1e-4
    assert np.allclose(scaler.as_pixels(there), rows, atol=1e-6)


def test_the_autoencoder_is_the_documents() -> None:
    model = Autoencoder(seed=1)
    assert [tuple(p.shape) for p in model.parameters()] == [(200, 784), (200,), (784, 200), (784,)]
    images = torch.rand(3, 784)
    by_hand = torch.log1p(torch.exp(images @ model.encoder.weight.T)) @ model.decoder.weight.T
    assert torch.allclose(model(images), by_hand, atol=1e-5)
    assert torch.allclose(reconstruction_cost(by_hand, images), ((by_hand - images) ** 2).sum() / 2)
    assert torch.equal(model.encoder.weight, Autoencoder(seed=1).encoder.weight)


def test_noise_disturbs_training_only() -> None:
    model, images = Autoencoder(noise=0.5, seed=1), torch.rand(3, 784)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    assert torch.equal(model(images), Autoencoder(seed=1)(images))


@pytest.mark.parametrize("larger", [False, True])
def test_the_transformer_begins_as_the_identity_and_learns_where_to_look(larger: bool) -> None:
    torch.manual_seed(0)
    model, images = SpatialTransformer(larger), torch.rand(4, 1, CANVAS, CANVAS)
    assert torch.allclose(model.eval().transform(images), images, atol=1e-5)
    logits = model.train()(images)
    assert logits.shape == (4, 10)
    logits.square().sum().backward()
    where = model.localisation[-1]
    assert isinstance(where, torch.nn.Linear) and where.bias.grad is not None and where.bias.grad.abs().max() > 0


def test_the_larger_transformer_computes_more() -> None:
    plain, larger = ([m for m in SpatialTransformer(size).sees if isinstance(m, torch.nn.Conv2d)] for size in (0, 1))
    assert [layer.stride for layer in plain] == [(2, 2)] * 2 and [layer.stride for layer in larger] == [(1, 1)] * 3


def test_the_network_of_the_photographs_is_the_tutorials() -> None:
    model = Cnn(seed=1)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1}
    assert shapes == {
        "conv1.weight": (64, 3, 5, 5),
        "conv2.weight": (64, 64, 5, 5),
        "full1.weight": (384, 2304),
        "full2.weight": (192, 384),
        "out.weight": (10, 192),
    }
    assert model(torch.rand(2, 3, 24, 24)).shape == (2, 10)
    assert torch.equal(model.full1.weight, Cnn(seed=1).full1.weight)
    assert model.conv1.weight.abs().max() <= 0.1 and model.full2.bias.unique().tolist() == [pytest.approx(0.1)]


def test_only_the_full_layers_decay() -> None:
    model = Cnn(channels=4)
    decaying, others = model.groups()
    assert decaying["weight_decay"] == 0.004 and others["weight_decay"] == 0.0
    parameters = [*decaying["params"], *others["params"]]  # type: ignore[misc]
    assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))
    assert {id(p) for p in decaying["params"]} == {id(model.full1.weight), id(model.full2.weight)}  # type: ignore[attr-defined]


def test_the_norm_is_tensorflows() -> None:
    """tf.nn.lrn(x, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75): the sum over nine neighbours, not their mean."""
    values = torch.rand(1, 64, 1, 1)
    flat = values[0, :, 0, 0]
    sums = torch.stack([flat[max(0, i - 4) : i + 5].square().sum() for i in range(64)])
    expected = flat / (1.0 + 0.001 / 9.0 * sums) ** 0.75
    assert torch.allclose(Cnn().norm(values)[0, :, 0, 0], expected, atol=1e-6)
