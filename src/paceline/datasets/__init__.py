"""WHERE do the examples come from? mnist ships inside the package; other sets are fetched when asked for.

Called by scripts, demos and the lab. Must never download at import, nor a set that is already there.
"""

from paceline.datasets.catalogue import CATALOGUE, get

__all__ = ["CATALOGUE", "get"]
