"""WHAT did TensorFlow call it? `import paceline.tf1 as tf`: the names of ingraph/tf1 under a short one."""

from typing import TYPE_CHECKING

from paceline.ingraph.tf1 import *  # noqa: F403
from paceline.ingraph.tf1 import __all__ as __all__

if not TYPE_CHECKING:
    from paceline.ingraph.tf1 import __getattr__ as __getattr__
