"""Keras models, optimizers and data in a worker, with any of Keras's backends."""
