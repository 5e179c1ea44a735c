"""WHICH scripts does `paceline demo` start? Plain training scripts, each readable by itself, and what to look at.

Called by the command line, which starts them as it does a user's script. Must never import them.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

HERE = Path(__file__).parent


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """A script; what its reader should look at, and might try; flags of `run` that it has where the user says nothing
    else."""

    script: Path
    look_at: str
    tries: tuple[str, ...] = ()  # own options of the script
    flags: dict[str, object] = {}

    def advice(self, args: Sequence[str]) -> str:
        """What to look at, and what of the rest to try after it ran with these arguments."""
        given = {arg.partition("=")[0] for arg in args}
        left = [f"-- {each}" for each in self.tries if each.split()[0] not in given]
        return f"{self.look_at} Try {', or '.join(left)}." if left else self.look_at


DEMOS: dict[str, Demo] = {
    "mnist": Demo(
        script=HERE / "mnist.py",
        look_at="test_accuracy above, of each worker when it ended; the same with --mode sync, or --workers 4.",
    ),
    "autoencoder": Demo(
        script=HERE / "autoencoder.py",
        look_at="the picture: digits it never saw, below them what 200 numbers keep of each.",
        tries=("--noise 0.5 (a row more)", "--hidden 20"),
    ),
    "transformer": Demo(
        script=HERE / "transformer.py",
        look_at="the picture: cluttered digits, below them as the classifier gets them, moved and magnified.",
        tries=("--epochs 30", "--larger"),
    ),
    "cifar10": Demo(
        script=HERE / "cifar10.py",
        look_at="accuracy beside averaged_accuracy; the picture: images, and what training sees of them.",
        tries=("--data-dir DIR (the real set; this one is made up, for want of a download)",),
        flags={"ema": 0.95},
    ),
}
