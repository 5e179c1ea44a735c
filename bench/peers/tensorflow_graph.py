"""The peer TensorFlow: its own runtime with ps and worker tasks, between-graph, async or sync, document 000's recipe.

By hand, from the root of the repository:  python bench/peers/tensorflow_graph.py --steps 300
The lab starts the tasks itself and speaks with each worker over stdin and stdout (speaking.py).

The graph is that of examples/tensorflow/tfdist_between.py (without tasks: of tfsingle.py), at its best: one thread an
operation as everybody here, the step fetches nothing but itself, and the session's call is made once (make_callable).

--sync is tfdist_between_sync.py, set up as the documentation of SyncReplicasOptimizer says: the chief alone runs its
queue runner, and each task has an init op of its own. No tokens at the start: no gradient is ever stale or lost.
Workers count updates, not calls: one may take a token that was meant for the other and be a call ahead, and who counted
calls would end while the other waits for it. A call gives back its token, the number of the update, at no cost.
"""

import argparse
import os
from collections.abc import Callable

import numpy as np
import speaking

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

try:
    import tensorflow.compat.v1 as tf
except ImportError:
    tf = None


def step_of_document_000(optimizer: object) -> tuple[object, list[object], list[object]]:
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
    step = optimizer.minimize(loss, global_step=global_step)
    return step, [x, y], [hidden_weights, hidden_bias, weights, bias]


def trainer(sess: object, step: object, fed: list[object], args: argparse.Namespace) -> Callable[[int], None]:
    images, labels = speaking.load(args.data)
    one_hot = np.eye(10, dtype=np.float32)[labels]
    chance = np.random.default_rng(args.task)
    run = sess.make_callable(step, feed_list=fed)
    wanted = 0  # updates, of all orders so far

    def once() -> int | None:
        batch = chance.integers(0, len(images), speaking.BATCH)
        return run(images[batch], one_hot[batch])

    def train(steps: int) -> None:
        for _ in range(steps):
            once()

    def train_together(updates: int) -> None:
        nonlocal wanted
        wanted += updates
        while once() < wanted:
            pass

    return train_together if args.sync else train


def supervisor_of(optimizer: object, is_chief: bool, is_sync: bool) -> object:
    """Who initialises what; a worker looks every second, not every 30, whether the chief has."""
    own = {}
    if is_sync:
        own["local_init_op"] = optimizer.chief_init_op if is_chief else optimizer.local_step_init_op
        own["ready_for_local_init_op"] = optimizer.ready_for_local_init_op
    init = tf.global_variables_initializer()
    return tf.train.Supervisor(is_chief=is_chief, init_op=init, recovery_wait_secs=1, logdir=None, **own)


def main() -> None:
    parser = speaking.options(__doc__)
    speaking.add_tasks(parser)
    parser.add_argument("--sync", action="store_true", help="each update is the mean of all workers' gradients")
    args = parser.parse_args()
    if args.sync and not args.ps_hosts:
        parser.error("--sync needs --ps-hosts and --worker-hosts")
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
    optimizer = tf.train.GradientDescentOptimizer(speaking.LEARNING_RATE)
    if args.sync:
        optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=len(args.worker_hosts.split(",")))
    is_chief = args.task == 0
    with tf.device(place):
        step, fed, trained = step_of_document_000(optimizer)
        supervisor = supervisor_of(optimizer, is_chief, args.sync)
    with supervisor.prepare_or_wait_for_session(target, config=config) as sess:
        if args.sync and is_chief:
            supervisor.start_queue_runners(sess, [optimizer.get_chief_queue_runner()])
        train = trainer(sess, step, fed, args)
        speaking.obey(say, train, lambda: sess.run(trained), args)


if __name__ == "__main__":
    main()
