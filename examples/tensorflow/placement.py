"""Document 001's program, on TensorFlow's own runtime: two products on two GPUs, their sum on the CPU, and a log.

    python placement.py                               CUDA_VISIBLE_DEVICES=0 python placement.py
    python placement.py 0,1                           CUDA_VISIBLE_DEVICES=0,1 python placement.py

Look at the lines `MatMul_1: (MatMul): /job:localhost/replica:0/task:0/device:…`.
"""

import os
import sys

if sys.argv[1:] == ["0"]:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
elif sys.argv[1:] == ["0,1"]:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now

tf.disable_eager_execution()  # TF2: a graph and a session are no longer the default

c = []
for d in ["/device:GPU:2", "/device:GPU:3"]:
    with tf.device(d):
        a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
        b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
        c.append(tf.matmul(a, b))
with tf.device("/cpu:0"):
    sum = tf.add_n(c)
# Here: allow_soft_placement, too, without which a machine with fewer than four cards refuses.
sess = tf.Session(config=tf.ConfigProto(log_device_placement=True, allow_soft_placement=True))
print(sess.run(sum))
