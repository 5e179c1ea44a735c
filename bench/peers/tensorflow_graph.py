"""The peer TensorFlow: its own runtime with ps and worker tasks, between-graph and asynchronous, document 000's recipe.

By hand, from the root of the repository:  python bench/peers/tensorflow_graph.py --steps 300
The lab starts the tasks itself and speaks with each worker over stdin and stdout (src/paceline/lab/processes.py).

The graph is that of examples/tensorflow/tfdist_between.py (without tasks: of tfsingle.py), at its best: one thread an
operation as everybody here, the step fetches nothing but itself, and the session's call is made once (make_callable).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
BATCH = 100
LEARNING_RATE = 0.001

try:
    import tensorflow.compat.v1 as tf
except ImportError:
    tf = None


def load(folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """The images that the lab wrote down; by hand random ones, which cost the same."""
    if folder is None:
        chance = np.random.default_rng(0)
        return chance.random((55_000, 784), np.float32), chance.integers(0, 10, 55_000)
    return np.load(folder / "x.npy"), np.load(folder / "y.npy")


def step_of_document_000() -> tuple[object, list[object]]:
    """The training step, and what it is fed with."""
    tf.set_random_seed(1)
    global_step = tf.train.get_or_create_global_step()
    x = tf.placeholder(tf.float32, shape=[None, 784])
    y = tf.placeholder(tf.float32, shape=[None, 10])
    hidden_weights = tf.Variable(tf.random_normal([784, 100]))
    weights = tf.Variable(tf.random_normal([100, 10]))
    hidden_bias, bias = tf.Variable(tf.zeros([100])), tf.Variable(tf.zeros([10]))
    hidden = tf.nn.sigmoid(tf.matmul(x, hidden_weights) + hidden_bias)
    logits = tf.matmul(hidden, weights) + bias
    loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=y, logits=logits))
    return tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(loss, global_step=global_step), [x, y]


def trainer(sess: object, step: object, fed: list[object], folder: Path | None, seed: int) -> Callable[[int], None]:
    images, labels = load(folder)
    one_hot = np.eye(10, dtype=np.float32)[labels]
    chance = np.random.default_rng(seed)
    run = sess.make_callable(step, feed_list=fed)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = chance.integers(0, len(images), BATCH)
            run(images[batch], one_hot[batch])

    return train


def say(reply: dict[str, object]) -> None:
    print(json.dumps(reply), flush=True)


def timed(train: Callable[[int], None], untimed_steps: int, steps: int) -> float:
    """The time of a step in microseconds."""
    train(untimed_steps)
    began_s = time.perf_counter()
    train(steps)
    return 1e6 * (time.perf_counter() - began_s) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder with x.npy and y.npy")
    parser.add_argument("--steps", type=int, help="run so many steps once and print the time of one")
    parser.add_argument("--job", choices=["ps", "worker"], default="worker")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--ps-hosts", default="", help="none: one process, no server")
    parser.add_argument("--worker-hosts", default="")
    args = parser.parse_args()
    if tf is None:
        say({"missing": "TensorFlow is not installed (the extra tensorflow)"})
        return
    tf.disable_v2_behavior()
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    target, place = "", None
    if args.ps_hosts:
        cluster = tf.train.ClusterSpec({"ps": args.ps_hosts.split(","), "worker": args.worker_hosts.split(",")})
        server = tf.train.Server(cluster, job_name=args.job, task_index=args.task, config=config)
        if args.job == "ps":
            server.join()
        target = server.target
        place = tf.train.replica_device_setter(worker_device=f"/job:worker/task:{args.task}", cluster=cluster)
    with tf.device(place):
        step, fed = step_of_document_000()
        init = tf.global_variables_initializer()
    supervisor = tf.train.Supervisor(is_chief=args.task == 0, init_op=init, recovery_wait_secs=1, logdir=None)
    with supervisor.prepare_or_wait_for_session(target, config=config) as sess:
        train = trainer(sess, step, fed, args.data, args.task)
        if args.steps is not None:
            say({"us": timed(train, 50, args.steps)})
            return
        say({})
        for line in iter(sys.stdin.readline, ""):
            say({"us": timed(train, *map(int, line.split()))})


if __name__ == "__main__":
    main()
