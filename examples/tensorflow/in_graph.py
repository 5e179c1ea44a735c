"""In-graph replication (documents 000, 002, 004) on TensorFlow's own runtime: one client builds one graph for all.

    paceline run --plain --workers 3 in_graph.py               worker:0 is the client, the other two have a tower each

    python in_graph.py --job_name=ps --task_index=0            by hand, with the two workers of settings.py: one tower
    python in_graph.py --job_name=worker --task_index=1
    python in_graph.py --job_name=worker --task_index=0

The recipe is document 000's: `--lr=0.01 --batches=55` has the same curve at a tenth of the time. `--updates=async`
applies every tower's gradient as it comes. The variables lie on the ps; the client feeds every batch.
"""

import os
import threading
import time

import input_data  # TF2: `from tensorflow.examples.tutorials.mnist import input_data` is gone
import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now
from settings import ps_svrs, worker_svrs

tf.disable_v2_behavior()  # TF2: a graph, a session and TensorFlow 1's variables are no longer the default

tf.app.flags.DEFINE_string("job_name", "", "Either 'ps' or 'worker'")
tf.app.flags.DEFINE_integer("task_index", 0, "Index of task within the job; worker 0 is the client")
tf.app.flags.DEFINE_string("ps_hosts", ",".join(ps_svrs), "Other addresses than those of settings.py")
tf.app.flags.DEFINE_string("worker_hosts", ",".join(worker_svrs), "Other addresses than those of settings.py")
tf.app.flags.DEFINE_enum("updates", "sync", ["sync", "async"], "One update of the mean, or one of each tower")
tf.app.flags.DEFINE_integer("epochs", 100, "Passes over the set")
tf.app.flags.DEFINE_integer("batches", 550, "Of 100 images, for each tower in an epoch")
tf.app.flags.DEFINE_float("lr", 0.001, "Learning rate")
tf.app.flags.DEFINE_integer("seed", 1, "Of the first weights and the order of images")
tf.app.flags.DEFINE_string("data_dir", None, "A folder with MNIST; the embedded set when left out")
FLAGS = tf.app.flags.FLAGS

BATCH = 100
VARIABLES = "/job:ps/task:0/cpu:0"


def done_queue(index):
    """Lies at worker `index`, which waits for the client's word in it."""
    with tf.device("/job:worker/task:%d/cpu:0" % index):
        return tf.FIFOQueue(1, tf.int32, shapes=[[]], shared_name="done_%d" % index)


def join(server, config):
    """Serve until the client is done. Here: server.join() never returns, and no one would know that all is over."""
    config.device_filters.append("/job:worker/task:%d" % FLAGS.task_index)  # do not wait for the other tasks
    with tf.Session(server.target, config=config) as sess:
        sess.run(done_queue(FLAGS.task_index).dequeue())


def model(x):
    with tf.variable_scope("model", reuse=tf.AUTO_REUSE), tf.device(VARIABLES):
        W1 = tf.get_variable("W1", [784, 100], initializer=tf.random_normal_initializer())
        W2 = tf.get_variable("W2", [100, 10], initializer=tf.random_normal_initializer())
        b1 = tf.get_variable("b1", [100], initializer=tf.zeros_initializer())
        b2 = tf.get_variable("b2", [10], initializer=tf.zeros_initializer())
    return tf.add(tf.matmul(tf.nn.sigmoid(tf.add(tf.matmul(x, W1), b1)), W2), b2)


def average_gradients(tower_grads):
    """Document 001's average_gradients: one mean over the towers for each variable."""
    return [
        (tf.add_n([grad for grad, _ in pairs]) / len(pairs), pairs[0][1]) for pairs in zip(*tower_grads, strict=True)
    ]


def train(server, config, towers):
    tf.set_random_seed(FLAGS.seed)
    opt = tf.train.GradientDescentOptimizer(FLAGS.lr)
    feeds, costs, tower_grads = [], [], []
    for index in towers:
        with tf.device("/job:worker/task:0/cpu:0"):
            x = tf.placeholder(tf.float32, shape=[None, 784])
            y_ = tf.placeholder(tf.float32, shape=[None, 10])
        with tf.device("/job:worker/task:%d" % index):
            z3 = model(x)
            cost = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=y_, logits=z3))
            tower_grads.append(opt.compute_gradients(cost))
        feeds.append((x, y_))
        costs.append(cost)
    with tf.device(VARIABLES):
        together = opt.apply_gradients(average_gradients(tower_grads))
        one_by_one = [opt.apply_gradients(grads) for grads in tower_grads]
    with tf.device("/job:worker/task:0"):
        test_x = tf.placeholder(tf.float32, shape=[None, 784])
        test_y = tf.placeholder(tf.float32, shape=[None, 10])
        right = tf.equal(tf.argmax(model(test_x), 1), tf.argmax(test_y, 1))
        accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
    tell_all = [done_queue(index).enqueue(1) for index in towers]
    sets = [input_data.read_data_sets(FLAGS.data_dir, one_hot=True) for _ in towers]
    for number, each in enumerate(sets):
        each.train.seed(FLAGS.seed * len(towers) + number)

    def batch_for(number):
        return dict(zip(feeds[number], sets[number].train.next_batch(BATCH), strict=True))

    def train_alone(sess, number, told):
        for _ in range(FLAGS.batches):
            _, told[number] = sess.run([one_by_one[number], costs[number]], feed_dict=batch_for(number))

    with tf.Session(server.target, config=config) as sess:
        sess.run(tf.global_variables_initializer())
        for epoch in range(FLAGS.epochs):
            began, told = time.time(), [0.0] * len(towers)
            if FLAGS.updates == "async":
                threads = [threading.Thread(target=train_alone, args=(sess, n, told)) for n in range(len(towers))]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                for _ in range(FLAGS.batches):
                    fed = {name: value for n in range(len(towers)) for name, value in batch_for(n).items()}
                    _, told = sess.run([together, costs], feed_dict=fed)
            print("Epoch %d: cost %.4f, %.2f s" % (epoch + 1, told[-1], time.time() - began), flush=True)
        digits = sets[0].test
        share = sess.run(accuracy, feed_dict={test_x: digits.images, test_y: digits.labels})
        print("Test-Accuracy: %2.2f" % share, flush=True)
        sess.run(tell_all)


def main(unused_argv):
    hosts = {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
    config = tf.ConfigProto(allow_soft_placement=True)
    threads = int(os.environ.get("OMP_NUM_THREADS", 0))
    config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = threads
    cluster = tf.train.ClusterSpec(hosts)
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index, config=config)
    if FLAGS.job_name == "ps":
        server.join()
    elif FLAGS.task_index > 0:
        join(server, config)
    else:
        train(server, config, range(1, len(hosts["worker"])) or [0])


if __name__ == "__main__":
    tf.app.run()
