"""The peer torch RPC: a parameter server as in PyTorch's tutorials, asynchronous, document 000's recipe.

By hand, from the root of the repository, a terminal each, with --ps-hosts=127.0.0.1:29500 --worker-hosts=w0:
    python bench/peers/torch_rpc.py --job=ps        and        python bench/peers/torch_rpc.py --steps=300
The lab starts the tasks itself and speaks with each worker over stdin and stdout (speaking.py).

Written as the tutorial "Implementing Batch RPC Processing Using Asynchronous Executions" does it (the trainer brings
the gradients of all parameters in one call and takes the new parameters home with the answer), without its waiting for
the others: each push is applied when it comes. At its best: tensors come back, not a pickled model; all of them as one
flat vector, because TensorPipe's cost is one a tensor; and no distributed autograd, which would record every call.
"""

from __future__ import annotations  # names of a PyTorch that may be missing

import threading
from collections.abc import Callable
from pathlib import Path

import speaking

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import rpc
    from torch.nn import functional
    from torch_model import arrays, flatten, model_of_document_000
except ImportError:  # or a build without RPC
    rpc = None


class ParameterServer:
    """The one copy that counts; RPC's threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._model = model_of_document_000()
        self._flat, self._gradients = flatten(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=speaking.LEARNING_RATE)

    def fetch(self) -> torch.Tensor:
        with self._lock:
            return self._flat.clone()

    def update_and_fetch(self, gradients: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._gradients.copy_(gradients)
            self._optimizer.step()
            return self._flat.clone()


SERVER: ParameterServer | None = None  # in the ps' process; made before anybody can call


def fetch() -> torch.Tensor:
    return SERVER.fetch()


def update_and_fetch(gradients: torch.Tensor) -> torch.Tensor:
    return SERVER.update_and_fetch(gradients)


def trainer(model: nn.Module, folder: Path | None, seed: int) -> Callable[[int], None]:
    images, labels = (torch.from_numpy(each) for each in speaking.load(folder))
    flat, gradients = flatten(model)
    flat.copy_(rpc.rpc_sync("ps", fetch))
    generator = torch.Generator().manual_seed(seed)
    count = len(images)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = torch.randint(0, count, (speaking.BATCH,), generator=generator)
            gradients.zero_()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            flat.copy_(rpc.rpc_sync("ps", update_and_fetch, args=(gradients,)))

    return train


def main() -> None:
    parser = speaking.options(__doc__)
    speaking.add_tasks(parser)
    args = parser.parse_args()
    if rpc is None or not (dist.is_available() and rpc.is_available()):
        speaking.missing("A PyTorch with RPC")
        return
    say = speaking.take_stdout()
    torch.set_num_threads(1)
    world_size = 1 + len(args.worker_hosts.split(","))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{args.ps_hosts}", num_worker_threads=world_size)
    if args.job == "ps":
        global SERVER
        SERVER = ParameterServer()
        rpc.init_rpc("ps", rank=0, world_size=world_size, rpc_backend_options=options)
    else:
        rpc.init_rpc(f"worker{args.task}", rank=1 + args.task, world_size=world_size, rpc_backend_options=options)
        model = model_of_document_000()
        train = trainer(model, args.data, args.task)
        speaking.obey(say, train, lambda: arrays(model), args)
    rpc.shutdown()  # waits until all others are done


if __name__ == "__main__":
    main()
