"""HOW do the printed lines read? One pure formatter for each line that readers of a task's log grep for.

`style` (--log-style) chooses the words: ours, or those that TensorFlow 1 and its programs print (docs/tensorflow.md).

Called by the runtime of a ps or worker task, which prints them; `now` and seconds come in as numbers.
Must never read a clock or print: the wording here is a contract, and tests hold it word for word.
"""

import re

import msgspec

from paceline.cluster.devices import Device
from paceline.cluster.settings import PACELINE, TF
from paceline.cluster.spec import ClusterSpec

INSECURE_LINE = (
    "WARNING: --insecure: no secret, no proof. Whoever reaches a port of this run can read the model, change it, and "
    "join the training."
)
ERROR = "paceline: error: "  # a task's own last word; what else it says with its name in front is no error


def error_line(error: BaseException) -> str:
    """Why a task ends, in its own words.

    >>> error_line(ValueError("2 ps are needed"))
    'paceline: error: 2 ps are needed'
    """
    return f"{ERROR}{error}"


class FailedAt(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker was when its script failed: its steps in this run and since its last start, and its batch."""

    step: int
    step_of_start: int
    batch: tuple[int, int, int] | None = None  # epoch, pass and batch; None: outside of a loader

    def is_same(self, other: "FailedAt") -> bool:
        """Tell whether both failed at the same step. After a restart a loop may begin anew or go on, so one count that
        agrees is enough.

        >>> at = FailedAt(step=40, step_of_start=12, batch=(2, 2, 7))
        >>> at.is_same(FailedAt(step=43, step_of_start=12)), at.is_same(FailedAt(step=43, step_of_start=3))
        (True, False)
        """
        return (
            self.step == other.step
            or self.step_of_start == other.step_of_start
            or (self.batch is not None and self.batch == other.batch)
        )


_FAILED_AT = re.compile(
    r"^Failed after (\d+) steps, (\d+) of this start(?:; epoch (\d+), pass (\d+), batch (\d+))?$", re.MULTILINE
)


def failed_line(at: FailedAt) -> str:
    """Write where a worker's script failed; read_failed reads it.

    >>> failed_line(FailedAt(step=40, step_of_start=12, batch=(2, 2, 7)))
    'Failed after 40 steps, 12 of this start; epoch 2, pass 2, batch 7'
    """
    where = "; epoch {}, pass {}, batch {}".format(*at.batch) if at.batch is not None else ""
    return f"Failed after {at.step} steps, {at.step_of_start} of this start{where}"


def read_failed(log: str) -> FailedAt | None:
    """Read the last line that failed_line has written.

    >>> read_failed("ValueError: 1\\nFailed after 40 steps, 12 of this start\\n")
    FailedAt(step=40, step_of_start=12, batch=None)
    """
    said = _FAILED_AT.findall(log)
    if not said:
        return None
    step, of_start, *batch = said[-1]
    where = (int(batch[0]), int(batch[1]), int(batch[2])) if batch[0] else None
    return FailedAt(step=int(step), step_of_start=int(of_start), batch=where)


def job_line(job: str) -> str:
    """Which job this task belongs to.

    >>> job_line("ps")
    'job_name : ps'
    """
    return f"job_name : {job}"


def task_line(index: int) -> str:
    """Which task of its job this is.

    >>> task_line(0)
    'task_index : 0'
    """
    return f"task_index : {index}"


def cluster_lines(cluster: ClusterSpec, style: str = PACELINE) -> list[str]:
    """One line a job, with the address of every task.

    >>> cluster_lines(ClusterSpec({"worker": ["host:2222", "host:2223"]}))
    ['Cluster: job worker -> {0 -> host:2222, 1 -> host:2223}']
    >>> cluster_lines(ClusterSpec({"ps": ["localhost:2222"]}), TF)
    ['Initialize GrpcChannelCache for job ps -> {0 -> localhost:2222}']
    """
    begin = "Initialize GrpcChannelCache for" if style == TF else "Cluster:"
    lines = []
    for job in cluster.jobs:
        tasks = [f"{index} -> {cluster.task_address(job, index)}" for index in cluster.task_indices(job)]
        lines.append(f"{begin} job {job} -> {{{', '.join(tasks)}}}")
    return lines


def started_line(address: str, style: str = PACELINE) -> str:
    """The task listens at this address.

    >>> started_line("host:2222")
    'Started server with target: paceline://host:2222'
    >>> started_line("host:2222", TF)
    'Started server with target: grpc://host:2222'
    """
    return f"Started server with target: {'grpc' if style == TF else 'paceline'}://{address}"


def waiting_line(task_device: str, seconds: float, why: str = "", style: str = PACELINE) -> str:
    """A task that has not answered yet; the word `worker` stands for any job, as in TensorFlow's own line.

    >>> waiting_line("/job:worker/replica:0/task:1", 20)
    'Still waiting for response from worker: /job:worker/replica:0/task:1 (20 s)'
    >>> waiting_line("/job:ps/replica:0/task:0", 0, "the host name 'hots' was not found")
    "Still waiting for response from worker: /job:ps/replica:0/task:0 (0 s): the host name 'hots' was not found"
    >>> waiting_line("/job:ps/replica:0/task:0", 20, style=TF)
    'CreateSession still waiting for response from worker: /job:ps/replica:0/task:0'
    """
    begin, since = ("CreateSession still", "") if style == TF else ("Still", f" ({seconds:.0f} s)")
    return f"{begin} waiting for response from worker: {task_device}{since}{f': {why}' if why else ''}"


def session_line(session: str, config: str, style: str = PACELINE) -> str:
    """A master session begins, with what its config says; TensorFlow writes that below.

    >>> session_line("c7c88ec51572b4dd", "log_device_placement: true")
    'Start master session c7c88ec51572b4dd with config: log_device_placement: true'
    >>> session_line("c7c88ec51572b4dd", "log_device_placement: true", TF).splitlines()
    ['Start master session c7c88ec51572b4dd with config:', 'log_device_placement: true']
    """
    space = "\n" if style == TF else " "
    return f"Start master session {session} with config:{space if config else ''}{config}"


def placed_line(node: str, kind: str, device: Device, style: str = PACELINE) -> str:
    """Where a node runs; a CPU is written as in the documents, which are of TensorFlow 1.3 and before.

    >>> placed_line("Const", "Const", Device.parse("/job:local/replica:0/task:0/cpu:0"))
    'Const: (Const): /job:local/replica:0/task:0/device:CPU:0'
    >>> placed_line("Const", "Const", Device.parse("/job:local/replica:0/task:0/cpu:0"), TF)
    'Const: (Const): /job:local/replica:0/task:0/cpu:0'
    """
    place = str(device).replace("/device:CPU:", "/cpu:") if style == TF else str(device)
    return f"{node}: ({kind}): {place}"


def step_line(now: float, worker: int, step: int, global_step: int, style: str = PACELINE) -> str:
    """One finished step of one worker.

    >>> step_line(1524487685.116428, 0, 8054, 9960)
    '1524487685.116428: Worker 0: training step 8054 done (global step: 9960)'
    >>> step_line(1524487685.116428, 0, 8054, 9960, TF)  # spelt as document 002's program spells it
    '1524487685.116428: Worker 0: traing step 8054 dome (global step:9960)'
    """
    if style == TF:
        return f"{now:f}: Worker {worker}: traing step {step} dome (global step:{global_step})"
    return f"{now:f}: Worker {worker}: training step {step} done (global step: {global_step})"


def begins_line(now: float) -> str:
    """Before the first step.

    >>> begins_line(1524487320.0)
    'Training begins @ 1524487320.000000'
    """
    return f"Training begins @ {now:f}"


def ends_line(now: float) -> str:
    """After the last step.

    >>> ends_line(1524487686.584364)
    'Training ends @ 1524487686.584364'
    """
    return f"Training ends @ {now:f}"


def elapsed_line(seconds: float, style: str = PACELINE) -> str:
    """From the begin to the end.

    >>> elapsed_line(366.604071)
    'Training elapsed time: 366.604071 s'
    >>> elapsed_line(366.604071, TF)
    'Training elapsed time:366.604071 s'
    """
    return f"Training elapsed time:{'' if style == TF else ' '}{seconds:f} s"


def switched_line(before: str, after: str, at_step: int, pause_ms: float | None) -> str:
    """The mode has changed; without a pause nobody had to stand still for it.

    >>> switched_line("async", "bounded, staleness 4", 1234, 3.21)
    'mode async -> bounded, staleness 4 at global step 1234; workers stood still for 3.2 ms'
    """
    pause = "" if pause_ms is None else f"; workers stood still for {pause_ms:.1f} ms"
    return f"mode {before} -> {after} at global step {at_step}{pause}"


def paused_line(lacks: int, min_workers: int) -> str:
    """Too few workers are in.

    >>> paused_line(1, 3)
    'Paused: 1 more worker needed (--min-workers 3)'
    """
    return f"Paused: {lacks} more worker{'s' if lacks != 1 else ''} needed (--min-workers {min_workers})"


def going_on_line(live: int, seconds: float) -> str:
    """Enough of them are in again.

    >>> going_on_line(3, 12.3)
    'Going on: 3 workers are in again, after 12 s'
    """
    return f"Going on: {live} worker{'s are' if live != 1 else ' is'} in again, after {seconds:.0f} s"
