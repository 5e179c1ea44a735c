"""The peer TensorFlow: its own runtime with ps and worker tasks, between-graph and asynchronous, document 000's recipe.

By hand, from the root of the repository:  python bench/peers/tensorflow_graph.py --steps 300
The lab starts the tasks itself and speaks with each worker over stdin and stdout (speaking.py).

The graph is that of examples/tensorflow/tfdist_between.py (without tasks: of tfsingle.py), at its best: one thread an
operation as everybody here, the step fetches nothing but itself, and the session's call is made once (make_callable).
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import speaking

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

try:
    import tensorflow.compat.v1 as tf
except ImportError:
    tf = None


def step_of_document_000() -> tuple[object, list[object], list[object]]:
    """The training step, what it is fed with, and what it trains."""
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
    step = tf.train.GradientDescentOptimizer(speaking.LEARNING_RATE).minimize(loss, global_step=global_step)
    return step, [x, y], [hidden_weights, hidden_bias, weights, bias]


def trainer(sess: object, step: object, fed: list[object], folder: Path | None, seed: int) -> Callable[[int], None]:
    images, labels = speaking.load(folder)
    one_hot = np.eye(10, dtype=np.float32)[labels]
    chance = np.random.default_rng(seed)
    run = sess.make_callable(step, feed_list=fed)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = chance.integers(0, len(images), speaking.BATCH)
            run(images[batch], one_hot[batch])

    return train


def main() -> None:
    parser = speaking.options(__doc__)
    speaking.add_tasks(parser)
    args = parser.parse_args()
    if tf is None:
        speaking.missing("TensorFlow")
        return
    say = speaking.take_stdout()
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
        step, fed, trained = step_of_document_000()
        init = tf.global_variables_initializer()
    supervisor = tf.train.Supervisor(is_chief=args.task == 0, init_op=init, recovery_wait_secs=1, logdir=None)
    with supervisor.prepare_or_wait_for_session(target, config=config) as sess:
        train = trainer(sess, step, fed, args.data, args.task)
        speaking.obey(say, train, lambda: sess.run(trained), args)


if __name__ == "__main__":
    main()
