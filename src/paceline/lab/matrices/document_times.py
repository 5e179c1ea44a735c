"""HOW LONG did an epoch take document 000's author? Seconds of each worker, by topology; of the first one where told.

Used by lab/matrices/seeds and lab/matrices/document_rows, so that a figure stands once. Pure data.
"""

import msgspec


class Times(msgspec.Struct, frozen=True):
    """By worker, as the document tells them."""

    epoch_s: tuple[float, ...] = ()
    first_s: tuple[float, ...] = ()  # of the first epoch


SINGLE = Times((1.3,))
ONE = Times((3.8,))
ASYNC = Times((5.45, 5.45))
ASYNC_TWO_GPUS = Times((5.24, 5.35))
SYNC = Times((5.35, 5.35))
ASYNC_TWO_PS = Times((6.6, 6.6), (9.0, 37.0))
SYNC_TWO_PS = Times((6.9, 6.9), (40.0, 38.0))
ASYNC_TWO_HOSTS = Times((4.2, 6.2), (15.5, 37.0))
ASYNC_THREE = Times((5.75, 5.85, 6.5), (12.0, 42.0, 37.0))  # on two hosts
