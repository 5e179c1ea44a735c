"""Document 004's cluster of two tasks, the first of them, on TensorFlow's own runtime.

    python hello_first.py
    python hello_second.py        in another terminal

Look at the line `CreateSession still waiting for response from worker: /job:local/replica:0/task:1`. Both serve for
ever: end them with Ctrl+\\, for server.join() does not hear Ctrl+C. `python hello_first.py pinned` has the document's
change.
"""

import sys

import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now

tf.disable_eager_execution()  # TF2: a graph and a session are no longer the default

if sys.argv[1:] == ["pinned"]:
    with tf.device("/job:local/task:1"):
        hello = tf.constant("Hello, distributed tensorflow.")
else:
    hello = tf.constant("Hello, distributed tensorflow.")
# Two tasks, one at port 20000, one at port 20001.
cluster = tf.train.ClusterSpec({"local": ["localhost:20000", "localhost:20001"]})
# This is the first one, so its index is 0.
server = tf.train.Server(cluster, job_name="local", task_index=0)

with tf.Session(server.target, config=tf.ConfigProto(log_device_placement=True)) as sess:
    print(sess.run(hello))

server.join()
