"""Start the lab as a process whose lines a test reads, and end it with the test, however that ends."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Yield the process. Killed, it takes what it has started with it; a test that fails waits for none of them."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as lab:
        try:
            yield lab
        finally:
            lab.kill()
