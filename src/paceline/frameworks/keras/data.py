"""Share a tf.data set out: each worker takes every n-th batch; a last round that is short repeats its own.

Called by ctx.prepare with a tf.data.Dataset. What comes back is one, too, for loops and for model.fit. Must never
change what a single worker would see.

INVARIANT: a pass reads the set once. A shuffled set draws the order of the next pass whenever it begins to be read. A
worker that read it once more, to fill the last round from the start, would have other orders than the others.
"""

from collections.abc import Callable
from typing import Any

from paceline.frameworks.keras.training_step import tf

ORDER = (
    "paceline: a tf.data set is shared out batch by batch: it must give all workers the same order, so shuffle with a "
    "seed: shuffle(n, seed=…)"
)


def share(dataset: Any, worker: int, num_workers: int, data: str, say: Callable[[str], None]) -> Any:
    """Return this worker's share; the same set if it is alone or takes everything."""
    if num_workers == 1 or data == "full":
        return dataset
    say(ORDER)
    spec = dataset.element_spec

    def leaves(*element: Any) -> tuple[Any, ...]:
        return tuple(leaf for leaf in tf.nest.flatten(element) if leaf is not None)

    def own(*round_: Any) -> Any:
        return tf.data.Dataset.zip(round_).repeat().skip(worker).take(1)

    def element(*taken: Any) -> Any:
        left = iter(taken)
        filled = [None if isinstance(leaf, tf.NoneTensorSpec) else next(left) for leaf in tf.nest.flatten(spec)]
        return tf.nest.pack_sequence_as(spec, filled)

    shared = dataset.map(leaves).window(num_workers).flat_map(own).map(element)
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return shared
    return shared.apply(tf.data.experimental.assert_cardinality(count if count < 0 else -(-count // num_workers)))


def batch_size_of(dataset: Any) -> int:
    """Return how many samples a batch has, as far as the set says; 0 if it does not."""
    spec = dataset.element_spec
    while isinstance(spec, tuple | list | dict) and spec:
        spec = next(iter(spec.values())) if isinstance(spec, dict) else spec[0]
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank in (None, 0):
        return 0
    return int(shape[0] or _declared(dataset))


def _declared(dataset: Any) -> int:
    """Return the n of batch(n), whose last batch may be smaller."""
    while dataset is not None:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            return int(size)
        dataset = getattr(dataset, "_input_dataset", None)
    return 0
