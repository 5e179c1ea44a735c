"""Document 003's three code blocks: a cluster with its flags, a ps that joins, a worker's graph under a Supervisor.

    python supervisor.py --job_name=ps --task_index=0
    python supervisor.py --job_name=worker --task_index=0
    python supervisor.py --job_name=worker --task_index=1

Look at the last line: the product was computed by the worker itself. All tasks serve until Ctrl+C, for a session begins
when every one of them is there. There are no variables in this small graph, and so nothing on the ps: training is what
tfdist_between.py does.
"""

from settings import ps_svrs, worker_svrs

import paceline.tf1 as tf

parameter_servers = ps_svrs
workers = worker_svrs
cluster = tf.train.ClusterSpec({"ps": parameter_servers, "worker": workers})

# input flags
tf.app.flags.DEFINE_string("job_name", "", "Either 'ps' or 'worker'")
tf.app.flags.DEFINE_integer("task_index", 0, "Index of task within the job")
FLAGS = tf.app.flags.FLAGS

# start a server for a specific task
server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)

if FLAGS.job_name == "ps":
    server.join()
elif FLAGS.job_name == "worker":
    with tf.device(
        tf.train.replica_device_setter(worker_device=f"/job:worker/task:{FLAGS.task_index}", cluster=cluster)
    ):
        a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
        b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
        product = tf.matmul(a, b)
        init_op = tf.initialize_all_variables()

    sv = tf.train.Supervisor(is_chief=(FLAGS.task_index == 0), init_op=init_op)
    with sv.prepare_or_wait_for_session(server.target, config=tf.ConfigProto(log_device_placement=True)) as sess:
        print(sess.run(product))
    server.join()
