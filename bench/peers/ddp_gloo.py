"""The peer PyTorch DDP on the gloo backend: document 000's recipe, one process a rank, gradients averaged every step.

By hand, from the root of the repository:  torchrun --nproc-per-node 2 bench/peers/ddp_gloo.py --steps 300
The lab starts the ranks itself and speaks with each over stdin and stdout (speaking.py).

Written as PyTorch's DDP tutorial does it (init_process_group from the environment, DistributedDataParallel around
the model), with the options that its documentation recommends for speed where they apply: gradients are views of
the buckets, and the graph is static. (The model has no buffers, so none are broadcast.)
"""

from __future__ import annotations  # names of a PyTorch that may be missing

import os
import sys
from collections.abc import Callable
from pathlib import Path

import speaking

try:
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from torch_model import arrays, model_of_document_000
except ImportError:
    torch = None


def trainer(ddp: DistributedDataParallel, folder: Path | None) -> Callable[[int], None]:
    images, labels = (torch.from_numpy(each) for each in speaking.load(folder))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=speaking.LEARNING_RATE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    count = len(images)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = torch.randint(0, count, (speaking.BATCH,), generator=generator)
            optimizer.zero_grad()
            functional.cross_entropy(ddp(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def main() -> None:
    args = speaking.options(__doc__).parse_args()
    if torch is None or not (dist.is_available() and dist.is_gloo_available()):
        speaking.missing("A PyTorch with gloo")
        return
    say = speaking.take_stdout()
    torch.set_num_threads(1)
    if sys.platform == "linux" and os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    model = model_of_document_000()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    speaking.obey(say, trainer(ddp, args.data), lambda: arrays(model), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
