"""WHEN is a checkpoint due? What `--save-every` says, asked by ps:0 after every update.

Pure: versions and the time come in.
"""

from math import inf

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class SavePolicy:
    """Every so many updates, or every so many seconds; "none": never.

    >>> policy = SavePolicy("500")
    >>> policy.is_due(499, now_s=9.0), policy.is_due(500, now_s=9.1), policy.is_due(501, now_s=9.2)
    (False, True, False)
    """

    def __init__(self, every: str) -> None:
        self._updates: int | None = None
        self._seconds: float | None = None
        if every[-1:] in SECONDS and every != "none":
            self._seconds = float(every[:-1]) * SECONDS[every[-1]]
        elif every != "none":
            self._updates = int(every)
        self.last_s: float | None = None
        self._is_wanted = False

    def is_due(self, version: int, now_s: float) -> bool:
        """Whether what this version holds is to be saved."""
        if self._is_wanted:
            return True
        if self._updates is not None:
            return version % self._updates == 0
        if self._seconds is None:
            return False
        if self.last_s is None:
            self.last_s = now_s  # the first period begins with the first update
        return now_s - self.last_s >= self._seconds

    def next_due(self, version: int) -> tuple[float, float]:
        """Return before which version, and before which time, `is_due` is false of a version after this one.

        >>> SavePolicy("500").next_due(499), SavePolicy("500").next_due(500)
        ((500, inf), (1000, inf))
        """
        if self._is_wanted or (self._seconds is not None and self.last_s is None):
            return 0, 0.0
        if self._updates is not None:
            return version - version % self._updates + self._updates, inf
        return inf, inf if self._seconds is None or self.last_s is None else self.last_s + self._seconds

    def saved(self, now_s: float) -> None:
        """One is being made: the next period begins."""
        self.last_s, self._is_wanted = now_s, False

    def want(self) -> None:
        """Somebody cannot wait for the next period."""
        self._is_wanted = True
