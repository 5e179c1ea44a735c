"""The peer Ray: a parameter server of actors, asynchronous, document 000's recipe; a small cluster of its own.

By hand, from the root of the repository:  .venv-peers/bin/python bench/peers/ray_actors.py --steps 300
The lab starts this one process, Ray the others, which end with it; it speaks over stdin and stdout (speaking.py).

Written as Ray's example "Parameter Server" does it: one actor holds the parameters, one actor a worker computes
gradients, both as numpy arrays, which Ray's object store carries without a copy on the reader's side. At its best: the
arrays are one flat vector, and a worker calls the ps itself and takes the new parameters home with the answer, so that
no third process has to wake up in every step (--driver: it does, as in the example).
"""

from __future__ import annotations  # names of a PyTorch that may be missing

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable

import numpy as np
import speaking

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
try:
    import ray
    import torch
    from torch.nn import functional
    from torch_model import flatten, model_of_document_000
except ImportError:
    ray = None
STORE_BYTES = 200_000_000
SHAPES = ((784, 100), (100,), (100, 10), (10,))


class ParameterServer:
    """The one copy that counts."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = model_of_document_000()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=speaking.LEARNING_RATE)
        self._flat, self._gradients = (each.numpy() for each in flatten(self._model))

    def fetch(self) -> np.ndarray:
        return self._flat

    def update_and_fetch(self, gradients: np.ndarray) -> np.ndarray:
        self._gradients[:] = gradients
        self._optimizer.step()
        return self._flat


class Worker:
    """Computes gradients, and brings them to the ps."""

    def __init__(self, server: object, args: object, seed: int) -> None:
        torch.set_num_threads(1)
        self._server = server
        self._model = model_of_document_000()
        self._flat, self._gradients = (each.numpy() for each in flatten(self._model))
        self._images, self._labels = (torch.from_numpy(each) for each in speaking.load(args.data))
        self._generator = torch.Generator().manual_seed(seed)
        self._flat[:] = ray.get(server.fetch.remote())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._flat[:] = ray.get(self._server.update_and_fetch.remote(self._gradients_of_a_batch()))

    def gradients(self, parameters: np.ndarray) -> np.ndarray:
        """For a driver that carries them."""
        self._flat[:] = parameters
        return self._gradients_of_a_batch()

    def _gradients_of_a_batch(self) -> np.ndarray:
        batch = torch.randint(0, len(self._images), (speaking.BATCH,), generator=self._generator)
        self._gradients[:] = 0
        functional.cross_entropy(self._model(self._images[batch]), self._labels[batch]).backward()
        return self._gradients


def by_themselves(workers: list[object]) -> Callable[[int], None]:
    """Workers that call the ps."""
    return lambda steps: ray.get([worker.steps.remote(steps) for worker in workers])


def by_driver(server: object, workers: list[object]) -> Callable[[int], None]:
    """As the example does: whoever's gradients are ready gets the parameters that they lead to."""

    def train(steps: int) -> None:
        begun = server.fetch.remote()
        working = {worker.gradients.remote(begun): worker for worker in workers}
        for number in range(steps * len(workers)):
            ready = ray.wait(list(working))[0][0]
            worker, parameters = working.pop(ready), server.update_and_fetch.remote(ready)
            if number < (steps - 1) * len(workers):
                working[worker.gradients.remote(parameters)] = worker
        ray.get(parameters)

    return train


def main() -> None:
    parser = speaking.options(__doc__)
    speaking.add_tasks(parser)
    parser.add_argument("--driver", action="store_true", help="the driver carries gradients, as in Ray's example")
    args = parser.parse_args()
    if ray is None:
        speaking.missing("Ray, or the PyTorch that its workers need,")
        return
    say = speaking.take_stdout()
    quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    with tempfile.TemporaryDirectory(prefix="peer-ray-") as folder:
        ray.init(num_cpus=1 + num_workers(args), object_store_memory=STORE_BYTES, _temp_dir=folder, **quiet)
        measure(say, args)
        ray.shutdown()


def num_workers(args: argparse.Namespace) -> int:
    """As many as addresses were given; Ray finds its own."""
    return len(args.worker_hosts.split(","))


def measure(say: Callable[[dict[str, object]], None], args: argparse.Namespace) -> None:
    """Make the actors, and obey."""
    server = ray.remote(num_cpus=1)(ParameterServer).remote()
    workers = [ray.remote(num_cpus=1)(Worker).remote(server, args, seed) for seed in range(num_workers(args))]
    train = by_driver(server, workers) if args.driver else by_themselves(workers)

    def parameters() -> list[np.ndarray]:
        flat, made = ray.get(server.fetch.remote()), []
        for inputs, *outputs in SHAPES:  # PyTorch's weights are outputs × inputs
            size = inputs * (outputs[0] if outputs else 1)
            made.append(flat[:size].reshape(*outputs, inputs).T.copy())
            flat = flat[size:]
        return made

    speaking.obey(say, train, parameters, args)


if __name__ == "__main__":
    main()
