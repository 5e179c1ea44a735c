"""WHICH scripts does `paceline demo` start? Plain training scripts, each readable by itself, and what to look at.

Called by the command line, which starts them as it does a user's script. Must never import them.
"""

from pathlib import Path

import msgspec

HERE = Path(__file__).parent


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """A script; what its reader should look at; flags of `run` that it has where the user says nothing else."""

    script: Path
    look_at: str
    flags: dict[str, object] = {}


DEMOS: dict[str, Demo] = {
    "mnist": Demo(
        script=HERE / "mnist.py",
        look_at="test_accuracy above, of each worker when it ended; the same with --mode sync, or --workers 4.",
    ),
    "autoencoder": Demo(
        script=HERE / "autoencoder.py",
        look_at="the picture: digits it never saw, below them what 200 numbers keep of each. "
        "Try -- --noise 0.5 (a row more), or -- --hidden 20.",
    ),
    "transformer": Demo(
        script=HERE / "transformer.py",
        look_at="the picture: cluttered digits, below them as the classifier gets them, moved and magnified. "
        "Try -- --epochs 30, or -- --larger.",
    ),
    "cifar10": Demo(
        script=HERE / "cifar10.py",
        look_at="accuracy beside averaged_accuracy; the picture: images, and what training sees of them. The set is "
        "made up, for want of a download: -- --data-dir DIR takes the real one.",
        flags={"ema": 0.95},
    ),
}
