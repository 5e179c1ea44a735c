"""ONE client, many devices: ops, graphs and sessions over the tasks of a cluster, in TensorFlow's words."""
