"""A task that serves the ops of this file until it is stopped: `op_task.py JOB INDEX HOST:PORT …`."""

import os
import sys
import threading
import time

import torch

import paceline


@paceline.op(name="op_task:pid")
def pid() -> int:
    return os.getpid()


@paceline.op(name="op_task:work_for")
def work_for(seconds: float) -> str:
    """Busy for so long; says that it has begun."""
    print("at work", flush=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        torch.ones(10).sum()
        time.sleep(0.01)  # the work itself
    return "done"


@paceline.op(name="op_task:joins")
def joins() -> bool:
    """Returns when the main thread of this task waits in Server.join."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        frame = sys._current_frames().get(main)
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if "join" in names and "wait" in names:
            return True
        threading.Event().wait(0.01)


@paceline.op(name="op_task:fails")
def fails() -> None:
    raise LookupError("nothing there")


if __name__ == "__main__":
    job, index, *addresses = [word for word in sys.argv[1:] if not word.startswith("--")]
    paceline.Server({job: addresses}, job_name=job, task_index=int(index)).join()
