"""Document 000's tfsingle.py on TensorFlow's own runtime: two layers on MNIST in one plain process.

    python tfsingle.py

On the first GPU where there is one. `--lr=0.01 --batches=55` has the same curve at a tenth of the time. What the
programs here print is what their twins one folder up print, so that both can be compared line by line.
"""

import os
import time

import input_data  # TF2: `from tensorflow.examples.tutorials.mnist import input_data` is gone
import tensorflow.compat.v1 as tf  # TF2: `import tensorflow as tf` is another language by now

tf.disable_v2_behavior()  # TF2: a graph, a session and TensorFlow 1's variables are no longer the default

tf.app.flags.DEFINE_integer("epochs", 100, "Passes over the set")
tf.app.flags.DEFINE_integer("batches", 550, "Of 100 images, in an epoch")
tf.app.flags.DEFINE_float("lr", 0.001, "Learning rate")
tf.app.flags.DEFINE_integer("seed", 1, "Of the first weights and the order of images")
tf.app.flags.DEFINE_string("data_dir", None, "A folder with MNIST; the embedded set when left out")
FLAGS = tf.app.flags.FLAGS

config = tf.ConfigProto(allow_soft_placement=True)
config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = int(os.environ.get("OMP_NUM_THREADS", 0))

mnist = input_data.read_data_sets(FLAGS.data_dir, one_hot=True)
mnist.train.seed(FLAGS.seed)
tf.set_random_seed(FLAGS.seed)

with tf.device("/gpu:0"):
    x = tf.placeholder(tf.float32, shape=[None, 784])
    y_ = tf.placeholder(tf.float32, shape=[None, 10])
    W1 = tf.Variable(tf.random_normal([784, 100]))
    W2 = tf.Variable(tf.random_normal([100, 10]))
    b1 = tf.Variable(tf.zeros([100]))
    b2 = tf.Variable(tf.zeros([10]))
    a2 = tf.nn.sigmoid(tf.add(tf.matmul(x, W1), b1))
    z3 = tf.add(tf.matmul(a2, W2), b2)
    cross_entropy = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=y_, logits=z3))
    grad_op = tf.train.GradientDescentOptimizer(FLAGS.lr)
    train_op = grad_op.minimize(cross_entropy)
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(z3, 1), tf.argmax(y_, 1)), tf.float32))
    init_op = tf.global_variables_initializer()

with tf.Session(config=config) as sess:
    sess.run(init_op)
    for epoch in range(FLAGS.epochs):
        began = time.time()
        for _ in range(FLAGS.batches):
            batch_x, batch_y = mnist.train.next_batch(100)
            _, cost = sess.run([train_op, cross_entropy], feed_dict={x: batch_x, y_: batch_y})
        print("Epoch %d: cost %.4f, %.2f s" % (epoch + 1, cost, time.time() - began), flush=True)
    right = sess.run(accuracy, feed_dict={x: mnist.test.images, y_: mnist.test.labels})
    print("Test-Accuracy: %2.2f" % right, flush=True)
