"""HOW FAST did bytes cross from host to host? What each system took for the same exchange, and how ours stands.

Written by lab/scripts/links_script, read by lab/matrices/links. Pure: no clock, no file.
"""

import msgspec

from paceline.lab.tables import quantile

OURS, RAW, RAW_AGAIN, GLOO = "paceline", "raw socket", "raw socket again", "Gloo"
THEIRS = (RAW, RAW_AGAIN, GLOO)
LOWER = 0.25


class Crossed(msgspec.Struct, frozen=True, kw_only=True):
    """By system: the microseconds of an exchange in every repetition (of several connections: the slowest one's), and
    how much of a limited link was used, by the bytes of its interface."""

    us: dict[str, list[float]]
    used: dict[str, list[float]] = {}
    others: float = 0.0  # cores that other programs used meanwhile

    def quartile_us(self, *systems: str) -> float | None:
        """The lower quartile of all that these took; None when none of them was measured.

        >>> Crossed(us={RAW: [1.0, 2.0], RAW_AGAIN: [3.0]}).quartile_us(RAW, RAW_AGAIN, GLOO)
        1.5
        """
        times = [us for system in systems for us in self.us.get(system, ())]
        return quantile(times, LOWER) if times else None

    @property
    def better_us(self) -> float | None:
        """The better of the two that ours is held against; the two raw sockets are one."""
        found = [self.quartile_us(RAW, RAW_AGAIN), self.quartile_us(GLOO)]
        return min((us for us in found if us is not None), default=None)

    @property
    def share(self) -> float | None:
        """What ours reaches of the better one.

        >>> Crossed(us={OURS: [5.0], RAW: [4.0], GLOO: [8.0]}).share
        0.8
        """
        ours, better = self.quartile_us(OURS), self.better_us
        return None if ours is None or better is None else better / ours

    @property
    def noise(self) -> float:
        """A/A: by how much two equal programs differ.

        >>> round(Crossed(us={RAW: [4.0], RAW_AGAIN: [5.0]}).noise, 3)
        0.2
        """
        first, again = self.quartile_us(RAW), self.quartile_us(RAW_AGAIN)
        return 0.0 if first is None or again is None else 1 - min(first, again) / max(first, again)

    def used_share(self, system: str) -> float | None:
        """Of the limited link, the lower quartile: the worst of a few is no accident."""
        shares = self.used.get(system, [])
        return quantile(shares, LOWER) if shares else None
