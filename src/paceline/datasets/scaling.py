"""WHAT is a standardised image? Each pixel with mean 0 and deviation 1 over the training set, and the way back.

Called by the demo autoencoder and examples. Must never divide by the deviation of a pixel that never changes.
"""

import msgspec
import numpy as np

from paceline.datasets.mnist import Pixels


class Scaler(msgspec.Struct, frozen=True, eq=False):
    """What was measured on the training set, for it and for every other one.

    >>> rows = np.array([[0.0, 5.0], [2.0, 5.0]], np.float32)
    >>> scaler = Scaler.measured(rows)
    >>> scaler.standardised(rows).tolist(), scaler.as_pixels(scaler.standardised(rows)).tolist()
    ([[-1.0, 0.0], [1.0, 0.0]], [[0.0, 5.0], [2.0, 5.0]])
    """

    mean: Pixels
    deviation: Pixels

    @classmethod
    def measured(cls, rows: Pixels) -> "Scaler":
        """Mean and deviation of each column; 1 where nothing ever changes, as scikit-learn's StandardScaler has it."""
        deviation = rows.std(axis=0, dtype=np.float64).astype(np.float32)
        return cls(rows.mean(axis=0, dtype=np.float64).astype(np.float32), np.where(deviation > 0, deviation, 1))

    def standardised(self, rows: Pixels) -> Pixels:
        """The rows as a network should see them."""
        return (rows - self.mean) / self.deviation

    def as_pixels(self, rows: Pixels) -> Pixels:
        """And back: what can be looked at."""
        return rows * self.deviation + self.mean
