"""WHAT holds for ops, graphs and tf1 on a real card? Where nodes run, where tensors lie, and document 001's sum.

`PYTHONPATH=src python tests/gpu/ops_on_card.py` runs all and prints a line each; tests/gpu/test_ops_on_card.py is
the same for pytest. Needs one card, and nothing but what paceline itself needs.
"""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable

import torch

import paceline
import paceline.tf1 as tf
from paceline.cluster.pinning import GpuUse
from paceline.ingraph.session import Session
from paceline.transport import held
from paceline.worker import torch_devices


@paceline.op
def where(x: torch.Tensor) -> list[str]:
    """Of what came, and of what is made."""
    return [str(x.device), str(torch.ones(1).device)]


@paceline.op
def times_two(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def check_scope() -> str:
    with paceline.device("/gpu:0"):
        assert where(torch.ones(2)) == ["cuda:0", "cuda:0"]
        stays = times_two(torch.ones(2))
    assert stays.device.type == "cuda", "what a local op returns stays where it was made"
    with paceline.device("/cpu:0"):
        assert where(stays)[0] == "cpu"
    return "a local scope moves what goes in, and makes what is made there"


def check_far_scope() -> str:
    address = f"localhost:{held.free_port('localhost')}"
    with paceline.Server({"worker": [address]}, "worker", 0), paceline.connect({"worker": [address]}):
        with paceline.device("/job:worker/task:0/gpu:0"):
            assert where(torch.ones(2)) == ["cuda:0", "cuda:0"]
            back = times_two(torch.ones(2, dtype=torch.bfloat16))
        assert back.device.type == "cpu" and back.dtype == torch.bfloat16 and back.tolist() == [2.0, 2.0]
    return "the same on another task; results come back to the CPU"


def check_session() -> str:
    graph = paceline.Graph()
    with graph:
        with paceline.device("/gpu:0"):
            one = where(graph.constant(torch.ones(2)))
        with paceline.device("/gpu:1"):  # the same card, under its second name
            two = where(graph.constant(torch.ones(2)))
        with paceline.device("/cpu:0"):
            three = where(times_two(graph.constant(torch.ones(2))))
    with Session(graph=graph) as session:
        assert session.run([one, two]) == [["cuda:0", "cuda:0"]] * 2
        assert session.run(three)[0] == "cpu"
    return "nodes on /gpu:0, /gpu:1 (virtual) and /cpu:0 in one step"


def check_document_001() -> str:
    tf.reset_default_graph()
    products = []
    for device in ("/device:GPU:0", "/device:GPU:1"):
        with tf.device(device):
            a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
            b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
            products.append(tf.matmul(a, b))
    with tf.device("/cpu:0"):
        total = tf.add_n(products)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), tf.Session(config=tf.ConfigProto(log_device_placement=True)) as session:
        assert session.run(total).tolist() == [[44.0, 56.0], [98.0, 128.0]]
    lines = said.getvalue().splitlines()
    assert lines[0] == "Device mapping:" and "device:GPU:0 -> device: 0, name: " in lines[1], lines
    assert "MatMul_1: (MatMul): /job:localhost/replica:0/task:0/device:GPU:1" in lines, lines
    assert "AddN: (AddN): /job:localhost/replica:0/task:0/device:CPU:0" in lines, lines
    return "[[44, 56], [98, 128]], its placements and the device mapping"


CHECKS: dict[str, Callable[[], str]] = {
    "scope": check_scope,
    "far scope": check_far_scope,
    "session": check_session,
    "document 001": check_document_001,
}


def run(name: str) -> str:
    torch_devices.configure(GpuUse(virtual=2))
    with tempfile.TemporaryDirectory() as config:
        os.environ["XDG_CONFIG_HOME"] = config  # a secret of this check's own
        return CHECKS[name]()


def main() -> None:
    for name in CHECKS:
        print(f"{name}: {run(name)}", flush=True)


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "--virtual-gpus=2"]
    main()
