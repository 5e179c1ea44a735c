"""The peer tf.distribute.ParameterServerStrategy with a ClusterCoordinator: asynchronous, document 000's recipe.

By hand, from the root of the repository, with two free ports:
    python bench/peers/tensorflow_strategy.py --ps-hosts=127.0.0.1:29500 --worker-hosts=127.0.0.1:29501 --steps=300
The lab starts the coordinator, which starts its tasks (they end with it) and speaks with the lab (speaking.py).

Written as TensorFlow's tutorial "Parameter server training with ParameterServerStrategy" does it: a custom loop, a
dataset a worker, functions that the coordinator schedules. At its best: several steps a scheduled function, as its
section on performance recommends, and threads as it says (as many between operations as there are workers, and one).
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import speaking

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
STEPS_A_CALL = 10

try:
    import tensorflow as tf
except ImportError:
    tf = None


def serve(cluster: object, job: str, task: int, num_workers: int) -> None:
    """Be a ps or a worker until the coordinator is gone."""
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=num_workers + 1)
    server = tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc", config=config)
    sys.stdin.read()  # its end: the coordinator has ended, in whichever way
    del server
    os._exit(0)


def start_tasks(hosts: dict[str, list[str]]) -> list[subprocess.Popen]:
    """All in our own process group, so that they are killed with us; a pipe tells them when we end otherwise."""
    given = [f"--{job}-hosts={','.join(addresses)}" for job, addresses in hosts.items()]
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", f"--job={job}", f"--task={task}", *given], stdin=subprocess.PIPE
        )
        for job, addresses in hosts.items()
        for task in range(len(addresses))
    ]


def dataset(folder: Path | None) -> object:
    """Random batches of the data, which every worker reads for itself."""
    if folder is None:
        images, labels = (tf.constant(each) for each in speaking.load(None))
    else:
        images, labels = in_file(folder / "x.npy"), in_file(folder / "y.npy")
    chance = tf.data.Dataset.random().batch(speaking.BATCH)
    count = tf.shape(images, tf.int64)[0]
    return chance.map(lambda at: (tf.gather(images, at % count), tf.gather(labels, at % count)))


def in_file(path: Path) -> object:
    """An array that numpy has saved, read by the worker itself."""
    array = np.load(path, mmap_mode="r")
    data = tf.strings.substr(tf.io.read_file(str(path)), array.offset, array.nbytes)
    return tf.reshape(tf.io.decode_raw(data, tf.as_dtype(array.dtype)), array.shape)


def variables() -> list[object]:
    chance = tf.random.Generator.from_seed(1)
    weights = [tf.Variable(chance.normal([784, 100])), tf.Variable(chance.normal([100, 10]))]
    biases = [tf.Variable(tf.zeros([100])), tf.Variable(tf.zeros([10]))]
    return [weights[0], biases[0], weights[1], biases[1]]


def trainer(strategy: object, num_workers: int, trained: list[object], folder: Path | None) -> Callable[[int], None]:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset(folder)))

    def replica(images: object, labels: object) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.nn.sigmoid(tf.matmul(images, trained[0]) + trained[1])
            logits = tf.matmul(hidden, trained[2]) + trained[3]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            variable.assign_sub(speaking.LEARNING_RATE * gradient)

    @tf.function
    def several(batches: object, count: object) -> None:
        for _ in tf.range(count):
            strategy.run(replica, args=next(batches))

    def train(steps: int) -> None:
        """Each worker, on the mean: the coordinator gives the next function to whoever is free."""
        for begun in range(0, steps, STEPS_A_CALL):
            for _ in range(num_workers):
                coordinator.schedule(several, args=(iterator, tf.constant(min(STEPS_A_CALL, steps - begun))))
        coordinator.join()

    return train


def main() -> None:
    parser = speaking.options(__doc__)
    speaking.add_tasks(parser)
    parser.add_argument("--serve", action="store_true", help="be this task, not the coordinator")
    args = parser.parse_args()
    if tf is None:
        speaking.missing("TensorFlow")
        return
    hosts = {"ps": args.ps_hosts.split(","), "worker": args.worker_hosts.split(",")}
    cluster = tf.train.ClusterSpec(hosts)
    if args.serve:
        serve(cluster, args.job, args.task, len(hosts["worker"]))
    say = speaking.take_stdout()
    tasks = start_tasks(hosts)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        trained = variables()
    train = trainer(strategy, len(hosts["worker"]), trained, args.data)
    speaking.obey(say, train, lambda: [each.numpy() for each in trained], args)
    for task in tasks:
        task.stdin.close()
        task.wait(10)
    os._exit(0)  # the coordinator's threads would take the end of their tasks for a failure


if __name__ == "__main__":
    main()
