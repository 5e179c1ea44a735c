"""Document 004's first program: a cluster of one task, a session on it, a greeting.

    python hello_local.py

Look at the three lines before the greeting: the cluster, the server's target, the master's session.
"""

import paceline.tf1 as tf

hello = tf.constant("Hello, distributed tensorflow.")
# A cluster of this process alone: job `local`, task 0, at a free port.
server = tf.train.Server.create_local_server()
# The session's master is the task at that target.
with tf.Session(server.target) as sess:
    print(sess.run(hello))
