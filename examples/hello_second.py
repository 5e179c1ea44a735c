"""Document 004's cluster of two tasks, the second of them; see hello_first.py.

Look at where `hello` runs: this is task 1 and its master, but an op that nobody placed runs on task 0.
"""

import paceline.tf1 as tf

hello = tf.constant("Hello, distributed tensorflow 2.")
cluster = tf.train.ClusterSpec({"local": ["localhost:20000", "localhost:20001"]})
# The second task, so its index is 1.
server = tf.train.Server(cluster, job_name="local", task_index=1)

with tf.Session(server.target, config=tf.ConfigProto(log_device_placement=True)) as sess:
    print(sess.run(hello))

server.join()
