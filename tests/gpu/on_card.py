"""HOW are the checks on a real card run? Each file beside this one has CHECKS; here they run, a line each.

`python tests/gpu/towers_on_card.py`, and the others likewise, run all of theirs, from the repository's root with
PYTHONPATH=src; tests/gpu/test_on_card.py is the same for pytest. Needs one card, and what paceline itself needs.
"""

import contextlib
import io
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from paceline.cluster.pinning import GpuUse
from paceline.frameworks.torch import devices as torch_devices

Check = Callable[[Path], str]  # in an empty folder; what it says is printed
ARGV = ["train.py", "--virtual-gpus=2"]  # a server reads its flags there


def in_this_process(check: Callable[[], str]) -> Check:
    """A check that needs no processes of its own: two virtual GPUs, a secret of its own."""

    def run(folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        before = sys.argv, os.environ.get("XDG_CONFIG_HOME")
        sys.argv, os.environ["XDG_CONFIG_HOME"] = ARGV, str(folder)
        torch_devices.configure(GpuUse(virtual=2))
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):  # servers greet
                return check()
        except BaseException as error:
            error.add_note(printed.getvalue())
            raise
        finally:
            sys.argv = before[0]
            del os.environ["XDG_CONFIG_HOME"]
            if before[1] is not None:
                os.environ["XDG_CONFIG_HOME"] = before[1]

    return run


def main(checks: Mapping[str, Check]) -> int:
    """All checks, a line each, whatever becomes of the others; 1 when one of them fails."""
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.cuda.get_device_name(0)}", flush=True)
    failed: list[str] = []
    for name, check in checks.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = f"ok      {check(Path(folder) / 'run')}"
            except Exception as error:
                failed.append(f"--- {name}\n{traceback.format_exc()}")
                said = f"FAILED  {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        print(f"{name:22} {time.monotonic() - began:5.1f} s  {said}", flush=True)
    print("".join(failed), end="")
    return 1 if failed else 0
