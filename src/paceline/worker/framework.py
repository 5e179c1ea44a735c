"""Choose the framework, torch or Keras, that a user's objects belong to, and import its modules.

Import no framework here: a TensorFlow process has no torch, and a torch process no TensorFlow.
"""

from importlib import import_module
from typing import Any

KERAS = {"keras", "tensorflow", "tf_keras"}  # packages whose classes are Keras's


def is_of_keras(kind: type[Any]) -> bool:
    """Tell whether a class comes from Keras or TensorFlow, even if Keras made it a torch module too."""
    return any(base.__module__.partition(".")[0] in KERAS for base in kind.__mro__)


def torch_module(name: str) -> Any:
    """Import `paceline.frameworks.torch.<name>`."""
    return import_module(f"paceline.frameworks.torch.{name}")


def keras_module(name: str) -> Any:
    """Import `paceline.frameworks.keras.<name>`."""
    return import_module(f"paceline.frameworks.keras.{name}")
