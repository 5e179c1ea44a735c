"""Document 004's cluster of two tasks, the first of them. Start this, then hello_second.py in another terminal.

    python hello_first.py
    python hello_second.py

Look at the line that says whom it waits for: a session begins when every task of the cluster is there. Both go on
serving until Ctrl+C. To run `hello` on the other task, put it into `with tf.device("/job:local/task:1"):`.
"""

import paceline.tf1 as tf

hello = tf.constant("Hello, distributed tensorflow.")
# Two tasks, one at port 20000, one at port 20001; write other hosts here to use two machines.
cluster = tf.train.ClusterSpec({"local": ["localhost:20000", "localhost:20001"]})
# This is the first one, so its index is 0.
server = tf.train.Server(cluster, job_name="local", task_index=0)

with tf.Session(server.target, config=tf.ConfigProto(log_device_placement=True)) as sess:
    print(sess.run(hello))

server.join()
