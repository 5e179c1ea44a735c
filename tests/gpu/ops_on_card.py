"""WHAT holds for ops, graphs and tf1 on a real card? Where nodes run, where tensors lie, and document 001's sum.

Run by tests/gpu/on_card.py.
"""

import contextlib
import io
import sys

import torch
from on_card import in_this_process, main

import paceline
import paceline.tf1 as tf
from paceline.ingraph.session import Session
from paceline.transport import port_reservation


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
    address = f"localhost:{port_reservation.free_port('localhost')}"
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
    assert "MatMul_1: (MatMul): /job:localhost/replica:0/task:0/device:GPU:1 (virtual)" in lines, lines
    assert "AddN: (AddN): /job:localhost/replica:0/task:0/device:CPU:0" in lines, lines
    return "[[44, 56], [98, 128]], its placements and the device mapping"


CHECKS = {
    "scope": in_this_process(check_scope),
    "far scope": in_this_process(check_far_scope),
    "session": in_this_process(check_session),
    "document 001": in_this_process(check_document_001),
}


if __name__ == "__main__":
    sys.exit(main(CHECKS))
