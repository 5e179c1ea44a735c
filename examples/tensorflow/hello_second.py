"""Document 004's cluster of two tasks, the second of them, on TensorFlow's own runtime; see hello_first.py.

Look at where `hello` runs. In the document an op that nobody placed runs on task 0; TensorFlow 2 runs it on the task
whose session it is, here task 1.
"""

import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now

tf.disable_eager_execution()  # TF2: a graph and a session are no longer the default

hello = tf.constant("Hello, distributed tensorflow 2.")

cluster = tf.train.ClusterSpec({"local": ["localhost:20000", "localhost:20001"]})
# The second task, so its index is 1.
server = tf.train.Server(cluster, job_name="local", task_index=1)

with tf.Session(server.target, config=tf.ConfigProto(log_device_placement=True)) as sess:
    print(sess.run(hello))

server.join()
