"""Document 004's first program, on TensorFlow's own runtime: a cluster of one task, a session on it, a greeting.

    python hello_local.py

Look at the line `Started server with target: grpc://localhost:…` before the greeting.
"""

import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now

tf.disable_eager_execution()  # TF2: a graph and a session are no longer the default

hello = tf.constant("Hello, distributed tensorflow.")
# A cluster of this process alone: job `local`, task 0, at a free port.
server = tf.train.Server.create_local_server()
# The session's master is the task at that target.
with tf.Session(server.target) as sess:
    print(sess.run(hello))
