"""WHAT holds on a real card? ps and two workers share one NVIDIA GPU: each check starts `paceline run` as a user does.

Run by tests/gpu/on_card.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from on_card import Check, main

PROGRAM = Path(__file__).parent / "programs" / "share.py"
TIMEOUT_S = 120.0


class Ran:
    """One run: its exit code, what it printed, its summary, and what the workers said about the card."""

    def __init__(self, folder: Path, *flags: str, script: tuple[str, ...] = (), visible: str | None = None) -> None:
        environ = {**os.environ, "CI": "1"}
        if visible is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible
        command = [sys.executable, "-m", "paceline", "run", "--ps", "1", "--workers", "2", "--run-dir", str(folder)]
        self.process = subprocess.run(
            [*command, "--save-every", "none", *flags, str(PROGRAM), *script],
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        self.code, self.output = self.process.returncode, self.process.stdout + self.process.stderr
        self.logs = {path.stem: path.read_text() for path in sorted((folder / "logs").glob("*.log"))}
        self.cards = [
            json.loads(found[1]) for log in self.logs.values() for found in re.finditer(r"^CARD (.*)$", log, re.M)
        ]
        summary = folder / "summary.json"
        self.summary = json.loads(summary.read_text()) if summary.exists() else {}

    def check_done(self) -> None:
        """It trained to its end."""
        assert self.code == 0 and self.summary["ok"], self.output + "\n".join(self.logs.values())
        assert len(self.cards) == 2, self.logs

    @property
    def devices(self) -> list[str]:
        """What the summary says that each worker trained on."""
        return [row["device"] for row in self.summary["workers"]]


def check_growth(folder: Path) -> str:
    """Both workers share the card; each takes what it needs, and no more."""
    ran = Ran(folder, "--log-device-placement")
    ran.check_done()
    assert [each["device"] for each in ran.cards] == ["cuda:0"] * 2 and ran.devices == ["/gpu:0"] * 2
    assert all(each["reserved"] < 0.05 for each in ran.cards), ran.cards
    mapping = r"^/job:worker/replica:0/task:1/device:GPU:0 -> device: 0, name: .+"
    assert re.search(mapping, ran.logs["worker-1"], re.M), ran.logs["worker-1"]
    return f"reserved {[round(each['reserved'], 4) for each in ran.cards]} of the card"


def check_fraction(folder: Path) -> str:
    """Without growth each takes its 0.3 at once, and the two of them fit."""
    ran = Ran(folder, "--no-allow-growth", "--gpu-memory-fraction", "0.3", script=("--hog", "0.35"))
    ran.check_done()
    assert all(0.27 < each["reserved"] <= 0.301 for each in ran.cards), ran.cards
    assert [each["hog"] for each in ran.cards] == ["refused"] * 2, ran.cards
    return f"reserved {[round(each['reserved'], 4) for each in ran.cards]} of the card"


def check_limit(folder: Path) -> str:
    """With growth the fraction is a limit, and what is below it is to be had."""
    ran = Ran(folder, "--gpu-memory-fraction", "0.3", script=("--hog", "0.2"))
    ran.check_done()
    assert [each["hog"] for each in ran.cards] == ["taken"] * 2, ran.cards
    return "0.2 was to be had under a limit of 0.3"


def check_virtual(folder: Path) -> str:
    """Two virtual GPUs on one card, marked wherever they are named."""
    ran = Ran(folder, "--virtual-gpus", "2", "--log-device-placement")
    ran.check_done()
    assert [each["device"] for each in ran.cards] == ["cuda:0"] * 2, ran.cards
    assert ran.devices == ["/gpu:0 (virtual)", "/gpu:1 (virtual)"] and ran.summary["virtual_gpus"] == 2
    assert "worker:1 on /gpu:1 (virtual)" in ran.output and "GPUs are virtual" in ran.output, ran.output
    assert "device:GPU:1 -> device: 0, name: " in ran.logs["worker-0"], ran.logs["worker-0"]
    tasks = json.loads((folder / "cluster.json").read_text())["tasks"]
    assert tasks["worker:1"]["device"] == "/job:worker/replica:0/task:1/device:GPU:1 (virtual)", tasks
    return "/gpu:0 and /gpu:1 on one card"


def check_hidden(folder: Path) -> str:
    """A set of cards that is empty leaves the CPU; one that names none that is there is said once, or refused."""
    none = Ran(folder / "none", visible="")
    none.check_done()
    assert none.devices == ["/cpu:0"] * 2, none.devices
    soft = Ran(folder / "soft", visible="7")
    soft.check_done()
    assert soft.logs["worker-0"].count("CUDA_VISIBLE_DEVICES=7 names no GPU") == 1, soft.logs
    pinned = Ran(folder / "pinned", "--worker-device", "/gpu:5", visible="0")
    pinned.check_done()
    assert pinned.logs["worker-1"].count("There is no /gpu:5 here") == 1, pinned.logs
    refused = Ran(folder / "refused", "--worker-device", "/gpu:5", "--no-soft-placement")
    assert refused.code == 2 and "/gpu:5" in refused.output, refused.output
    return "CPU, said once, refused"


def check_script(folder: Path) -> str:
    """What the script itself writes into os.environ before init counts: torch was imported before, CUDA was not."""
    shown = Ran(folder / "shown", script=("--visible", "0"), visible="")
    shown.check_done()
    assert shown.devices == ["/gpu:0"] * 2, shown.devices
    hidden = Ran(folder / "hidden", script=("--visible", ""))
    hidden.check_done()
    assert hidden.devices == ["/cpu:0"] * 2, hidden.devices
    return "the script's own set counts"


CHECKS: dict[str, Check] = {
    "growth": check_growth,
    "fraction": check_fraction,
    "limit": check_limit,
    "virtual": check_virtual,
    "hidden": check_hidden,
    "script": check_script,
}


if __name__ == "__main__":
    sys.exit(main(CHECKS))
