"""TF2: TensorFlow 1's `tensorflow.examples.tutorials.mnist.input_data`, which today's TensorFlow has no more.

The same split (55,000 / 5,000 / 10,000 images), the same `next_batch`; the files are those embedded in paceline.
"""

import numpy as np

from paceline.datasets import mnist

CLASSES = 10


class DataSet:
    """Images and labels in one order, which is drawn anew after each pass over them."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, one_hot: bool) -> None:
        self.images = images
        self.labels = np.eye(CLASSES, dtype=np.float32)[labels] if one_hot else labels
        self._order = np.random.default_rng()
        self._next = len(images)

    @property
    def num_examples(self) -> int:
        return len(self.images)

    def seed(self, number: int) -> None:
        """Which orders are drawn."""
        self._order = np.random.default_rng(number)

    def next_batch(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The next images and labels: views, so that nothing is copied before TensorFlow is fed."""
        if self._next + size > self.num_examples:
            chosen = self._order.permutation(self.num_examples)
            self.images, self.labels, self._next = self.images[chosen], self.labels[chosen], 0
        here = slice(self._next, self._next + size)
        self._next += size
        return self.images[here], self.labels[here]


class DataSets:
    """The three parts."""

    def __init__(self, split: mnist.Split, one_hot: bool) -> None:
        self.train = DataSet(split.train_x, split.train_y, one_hot)
        self.validation = DataSet(split.validation_x, split.validation_y, one_hot)
        self.test = DataSet(split.test_x, split.test_y, one_hot)


def read_data_sets(data_dir: str | None = None, one_hot: bool = False) -> DataSets:
    """MNIST of a folder, or the embedded one; nothing is downloaded."""
    return DataSets(mnist.load(data_dir).tensorflow_split(), one_hot)
