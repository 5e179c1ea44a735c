"""Document 000's tfdist_between_sync.py on TensorFlow's own runtime: each update is the mean of all workers' gradients.

    python tfdist_between_sync.py --job_name=ps --task_index=0
    python tfdist_between_sync.py --job_name=worker --task_index=0
    python tfdist_between_sync.py --job_name=worker --task_index=1

    paceline run --plain --workers 2 tfdist_between_sync.py

`diff tfdist_between.py tfdist_between_sync.py` is the document's, sections 3 and 4.
"""

import os
import time

import input_data  # TF2: `from tensorflow.examples.tutorials.mnist import input_data` is gone
import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now
from settings import ps_svrs, worker_svrs

tf.disable_v2_behavior()  # TF2: a graph, a session and TensorFlow 1's variables are no longer the default

# input flags
tf.app.flags.DEFINE_string("job_name", "", "Either 'ps' or 'worker'")
tf.app.flags.DEFINE_integer("task_index", 0, "Index of task within the job")
tf.app.flags.DEFINE_string("ps_hosts", ",".join(ps_svrs), "Other addresses than those of settings.py")
tf.app.flags.DEFINE_string("worker_hosts", ",".join(worker_svrs), "Other addresses than those of settings.py")
tf.app.flags.DEFINE_integer("epochs", 100, "Passes over the set")
tf.app.flags.DEFINE_integer("batches", 550, "Of 100 images, in an epoch")
tf.app.flags.DEFINE_float("lr", 0.001, "Learning rate")
tf.app.flags.DEFINE_integer("seed", 1, "Of the first weights and the order of images")
tf.app.flags.DEFINE_string("data_dir", None, "A folder with MNIST; the embedded set when left out")
FLAGS = tf.app.flags.FLAGS

# Here: addresses come from settings.py (000) or flags (002), not from lists in the program (003).
parameter_servers = ps_svrs = FLAGS.ps_hosts.split(",")
workers = worker_svrs = FLAGS.worker_hosts.split(",")
cluster = tf.train.ClusterSpec({"ps": parameter_servers, "worker": workers})

# start a server for a specific task; Here: with document 000's config, and as many threads as it is given
config = tf.ConfigProto(allow_soft_placement=True, log_device_placement=True)
config.gpu_options.allow_growth = True
config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = int(os.environ.get("OMP_NUM_THREADS", 0))
server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index, config=config)

if FLAGS.job_name == "ps":
    server.join()
elif FLAGS.job_name == "worker":
    mnist = input_data.read_data_sets(FLAGS.data_dir, one_hot=True)
    mnist.train.seed(FLAGS.seed + FLAGS.task_index)
    tf.set_random_seed(FLAGS.seed)

    with tf.device(
        tf.train.replica_device_setter(
            worker_device="/job:worker/task:%d/gpu:%d" % (FLAGS.task_index, FLAGS.task_index),
            cluster=cluster,
        )
    ):
        global_step = tf.get_variable("global_step", [], tf.int64, tf.constant_initializer(0), trainable=False)
        x = tf.placeholder(tf.float32, shape=[None, 784])
        y_ = tf.placeholder(tf.float32, shape=[None, 10])
        W1 = tf.Variable(tf.random_normal([784, 100]))
        W2 = tf.Variable(tf.random_normal([100, 10]))
        b1 = tf.Variable(tf.zeros([100]))
        b2 = tf.Variable(tf.zeros([10]))
        a2 = tf.nn.sigmoid(tf.add(tf.matmul(x, W1), b1))
        z3 = tf.add(tf.matmul(a2, W2), b2)
        cross_entropy = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=y_, logits=z3))
        grad_op = tf.train.GradientDescentOptimizer(FLAGS.lr)
        sync_op = tf.train.SyncReplicasOptimizer(
            grad_op,
            replicas_to_aggregate=len(worker_svrs),
            total_num_replicas=len(worker_svrs),
            use_locking=True,
        )
        train_op = sync_op.minimize(cross_entropy, global_step=global_step)
        # Here: how many updates there were. A worker may be a step ahead of another; who counted only its own steps
        # would end while the other one waits for it in the last round.
        with tf.control_dependencies([train_op]), tf.device(global_step.device):
            updates = tf.identity(global_step)
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(z3, 1), tf.argmax(y_, 1)), tf.float32))
        init_op = tf.initialize_all_variables()

    chief_queue_runner = sync_op.get_chief_queue_runner()
    # Here: recovery_wait_secs, for a worker looks only every 30 s whether the chief has initialised the variables.
    sv = tf.train.Supervisor(is_chief=(FLAGS.task_index == 0), init_op=init_op, recovery_wait_secs=1)
    # Here: the config once more, for a session's soft placement is its own.
    with sv.prepare_or_wait_for_session(server.target, config=config) as sess:
        if FLAGS.task_index == 0:
            sv.start_queue_runners(sess, [chief_queue_runner])
        done = 0
        for epoch in range(FLAGS.epochs):
            began = time.time()
            for _ in range(FLAGS.batches):
                batch_x, batch_y = mnist.train.next_batch(100)
                if done < FLAGS.epochs * FLAGS.batches:
                    cost, done = sess.run([cross_entropy, updates], feed_dict={x: batch_x, y_: batch_y})
            print("Epoch %d: cost %.4f, %.2f s" % (epoch + 1, cost, time.time() - began), flush=True)
        right = sess.run(accuracy, feed_dict={x: mnist.test.images, y_: mnist.test.labels})
        print("Test-Accuracy: %2.2f" % right, flush=True)
        if FLAGS.task_index == 0:
            sv.request_stop()
