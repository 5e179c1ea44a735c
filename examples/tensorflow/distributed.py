"""Document 002's distributed.py on TensorFlow's own runtime: two workers share 10,000 global steps on MNIST.

    python distributed.py --job_name="ps" --ps_hosts="a:2222" --worker_hosts="b:2222,c:2222" --task_index=0

    paceline run --plain --slow worker:1=4.2x distributed.py

Without --ps_hosts and --worker_hosts the cluster in settings.py is taken. It prints what the document shows, letter by
letter.
"""

import math
import os
import time

import input_data  # TF2: `from tensorflow.examples.tutorials.mnist import input_data` is gone
import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now
from settings import ps_svrs, worker_svrs

tf.disable_v2_behavior()  # TF2: a graph, a session and TensorFlow 1's variables are no longer the default

flags = tf.app.flags
IMAGE_PIXELS = 28
flags.DEFINE_string("data_dir", None, "A folder with MNIST; the embedded set when left out")
flags.DEFINE_integer("hidden_units", 100, "Number of units in the hidden layer of the NN")
flags.DEFINE_integer("train_steps", 10000, "Number of training steps to perform")
flags.DEFINE_integer("batch_size", 100, "Training batch size")
flags.DEFINE_float("learning_rate", 0.01, "Learning rate")
flags.DEFINE_string("ps_hosts", ",".join(ps_svrs), "Comma-separated list of hostname:port pairs")
flags.DEFINE_string("worker_hosts", ",".join(worker_svrs), "Comma-separated list of hostname:port pairs")
flags.DEFINE_string("job_name", None, "job name: worker or ps")
flags.DEFINE_integer("task_index", None, "Index of task within the job")
flags.DEFINE_integer("issync", 0, "1: synchronous, 0: asynchronous")
FLAGS = flags.FLAGS


def main(unused_argv):
    mnist = input_data.read_data_sets(FLAGS.data_dir, one_hot=True)
    if not FLAGS.job_name:
        raise ValueError("Must specify an explicit job_name!")
    print("job_name : %s" % FLAGS.job_name)
    if FLAGS.task_index is None:
        raise ValueError("Must specify an explicit task_index!")
    print("task_index : %d" % FLAGS.task_index)

    ps_spec = FLAGS.ps_hosts.split(",")
    worker_spec = FLAGS.worker_hosts.split(",")
    num_workers = len(worker_spec)
    cluster = tf.train.ClusterSpec({"ps": ps_spec, "worker": worker_spec})
    config = tf.ConfigProto()
    threads = int(os.environ.get("OMP_NUM_THREADS", 0))
    config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = threads
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index, config=config)
    if FLAGS.job_name == "ps":
        server.join()

    is_chief = FLAGS.task_index == 0
    worker_device = "/job:worker/task:%d/cpu:0" % FLAGS.task_index
    with tf.device(tf.train.replica_device_setter(worker_device=worker_device, cluster=cluster)):
        global_step = tf.Variable(0, name="global_step", trainable=False)
        hid_w = tf.Variable(
            tf.truncated_normal([IMAGE_PIXELS * IMAGE_PIXELS, FLAGS.hidden_units], stddev=1.0 / IMAGE_PIXELS),
            name="hid_w",
        )
        hid_b = tf.Variable(tf.zeros([FLAGS.hidden_units]), name="hid_b")
        sm_w = tf.Variable(
            tf.truncated_normal([FLAGS.hidden_units, 10], stddev=1.0 / math.sqrt(FLAGS.hidden_units)), name="sm_w"
        )
        sm_b = tf.Variable(tf.zeros([10]), name="sm_b")
        x = tf.placeholder(tf.float32, [None, IMAGE_PIXELS * IMAGE_PIXELS])
        y_ = tf.placeholder(tf.float32, [None, 10])
        hid = tf.nn.relu(tf.nn.xw_plus_b(x, hid_w, hid_b))
        y = tf.nn.softmax(tf.nn.xw_plus_b(hid, sm_w, sm_b))
        cross_entropy = -tf.reduce_sum(y_ * tf.log(tf.clip_by_value(y, 1e-10, 1.0)))
        opt = tf.train.AdamOptimizer(FLAGS.learning_rate)
        if FLAGS.issync == 1:
            opt = tf.train.SyncReplicasOptimizer(
                opt, replicas_to_aggregate=num_workers, total_num_replicas=num_workers, use_locking=True
            )
        train_step = opt.minimize(cross_entropy, global_step=global_step)
        # Here: the step is read after the update. Read beside it, as in the document, it may be the one before, and in
        # sync a worker would begin a round that nobody else joins.
        with tf.control_dependencies([train_step]), tf.device(global_step.device):
            step_now = tf.identity(global_step)
        init_op = tf.global_variables_initializer()

    sv = tf.train.Supervisor(is_chief=is_chief, init_op=init_op, recovery_wait_secs=1, global_step=global_step)
    if is_chief:
        print("Worker %d: Initailizing session..." % FLAGS.task_index)
    else:
        print("Worker %d: Waiting for session to be initaialized..." % FLAGS.task_index)
    sess = sv.prepare_or_wait_for_session(server.target, config=config)
    print("Worker %d: Session initialization  complete." % FLAGS.task_index)
    if FLAGS.issync == 1 and is_chief:
        sv.start_queue_runners(sess, [opt.get_chief_queue_runner()])

    time_begin = time.time()
    print("Traing begins @ %f" % time_begin)
    local_step = 0
    while True:
        batch_xs, batch_ys = mnist.train.next_batch(FLAGS.batch_size)
        _, step = sess.run([train_step, step_now], feed_dict={x: batch_xs, y_: batch_ys})
        local_step += 1
        now = time.time()
        print("%f: Worker %d: traing step %d dome (global step:%d)" % (now, FLAGS.task_index, local_step, step))
        if step >= FLAGS.train_steps:
            break
    time_end = time.time()
    print("Training ends @ %f" % time_end)
    print("Training elapsed time:%f s" % (time_end - time_begin))
    val_feed = {x: mnist.validation.images, y_: mnist.validation.labels}
    val_xent = sess.run(cross_entropy, feed_dict=val_feed)
    print("After %d training step(s), validation cross entropy = %g" % (FLAGS.train_steps, val_xent), flush=True)


if __name__ == "__main__":
    tf.app.run()
