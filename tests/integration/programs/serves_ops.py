"""In-graph in its smallest form: worker 0 is the client, the others only join."""

import os
import sys

import torch

import paceline


@paceline.op
def square(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * x, os.getpid()


server = paceline.Server()
if server.task.index > 0:
    server.join()
    print(f"{server.task} was let go")
    sys.exit(0)
for index in range(server.cluster.num_tasks("worker")):
    with paceline.device(f"/job:worker/task:{index}"):
        squared, pid = square(torch.arange(4.0) + index)
    print(f"worker:{index} says {squared.tolist()}, {'this' if pid == os.getpid() else 'another'} process")
