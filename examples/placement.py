"""Document 001's program: two products on two GPUs, their sum on the CPU, and a log of what went where.

    python placement.py

Look at the lines `MatMul_1: (MatMul): /job:localhost/replica:0/task:0/device:…`. A GPU that is not there is replaced by
the CPU, which is said once; ConfigProto(allow_soft_placement=False) refuses instead.
"""

import paceline.tf1 as tf

products = []
for device in ["/device:GPU:2", "/device:GPU:3"]:
    with tf.device(device):
        a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
        b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
        products.append(tf.matmul(a, b))
with tf.device("/cpu:0"):
    total = tf.add_n(products)

with tf.Session(config=tf.ConfigProto(log_device_placement=True)) as sess:
    print(sess.run(total))
