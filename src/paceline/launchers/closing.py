"""HOW does a run end for its user? The text about a failed task, and the last block of `paceline run`.

Called by launchers/supervisor, launchers/failures and launchers/crew, and where paths are printed.
Must never raise because a log or a report is missing, and must never print by itself.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paceline import files
from paceline.checkpoint import read
from paceline.checkpoint.manifest import step_of
from paceline.cluster.spec import Task
from paceline.launchers.restart import LOST
from paceline.telemetry import faults
from paceline.telemetry.lines import ERROR
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import SERVES, Metrics, ModeChange, WorkerReport

TRACEBACK = "Traceback (most recent call last)"
UNREADABLE = re.compile(r"(Syntax|Indentation|Tab)Error: ")
TAIL_BYTES = 64 * 1024
NOT_SAVED = "the final model could not be saved"
TAIL_LINES = 5
SHOWN_LINES = 60


def failure(task: Task, code: int, log: Path, reason: list[str]) -> str:
    """What happened to a task, where its log is, and why, as reason() found it.

    >>> failure(Task("worker", 1), -9, Path("/nowhere"), [])
    'worker:1 was killed by SIGKILL; its log: /nowhere'
    """
    head = f"{task} {how(code)}; its log: {shown(log)}"
    return "\n".join([head, *(f"  {line}" for line in reason)])


def how(code: int) -> str:
    """How a process ended, in a few words."""
    if code == LOST:
        return "was lost with its host"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def left_off(task: str) -> str:
    """Say what a worker that trained, and was gone with exit code 0 before its end, has left undone."""
    return (
        f"{task} was gone before the end of its script, with exit code 0, as os._exit(0) does: what comes at the end "
        f"was not done there (who ends last saves the final model). Call ctx.close() first."
    )


def reason(log: Path, begin: int = 0) -> list[str]:
    """The last traceback of a log from there on, else our own last sentence in it, else its last lines."""
    try:
        with files.reading(log.parent.parent, log) as file:
            file.seek(max(begin, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    said = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    begins = [number for number, line in enumerate(lines) if line.lstrip("| +").startswith(TRACEBACK)]
    if said and not begins:
        return lines[said[-1] :][:SHOWN_LINES]
    if begins:
        return lines[begins[-1] :][:SHOWN_LINES]
    return lines[-TAIL_LINES:]


def gist(lines: list[str]) -> str:
    """The line of a reason that says most: of a traceback the one that names the error.

    >>> gist(["Traceback (most recent call last):", "  File x", "ValueError: 2", "bye"])
    'ValueError: 2'
    >>> gist(["paceline: worker:1 was given up, and comes back"])
    ''
    >>> gist(['  File "train.py", line 2', "    x = (", "        ^", "SyntaxError: '(' was never closed"])
    "SyntaxError: '(' was never closed"
    >>> gist(['  File "train.py", line 2', "    x = (", "        ^", "SyntaxError: '(' was never closed", "bye"])
    "SyntaxError: '(' was never closed"
    """
    if lines and lines[0].startswith(TRACEBACK):
        return next((line for line in lines[1:] if line and not line.startswith(" ")), "")
    if any(line.startswith('  File "') for line in lines):  # Python may have read nothing: there is no traceback then
        unread = [line for line in lines if UNREADABLE.match(line)]
        if unread:
            return unread[-1]
    return lines[0] if lines and lines[0].startswith(ERROR) else ""


def block(
    summary: Mapping[str, object],
    paths: RunPaths,
    causes: Sequence[str] = (),
    resume: str = "",
    will_repeat: bool = False,
) -> str:
    """The last lines of a run: why it failed, what was done, by whom, how fast, and where everything lies.
    `will_repeat`: the same command would only fail again."""
    outcome = "Training done" if summary["ok"] else f"Training failed: {summary['error']}"
    if summary["error"] == NOT_SAVED:
        outcome = f"Training done, but {NOT_SAVED}"
    if summary["error"] == "interrupted":
        outcome = "Training interrupted"
    changes = msgspec.convert(summary["modes"], list[ModeChange])
    step, mode = summary["global_step"], ", then ".join([str(summary["mode_spec"]), *(c.mode for c in changes)])
    workers = msgspec.convert(summary["workers"], list[WorkerReport])
    has_trained = not workers or any(not report.ops for report in workers) or bool(step)
    lines = [*causes, f"{outcome}; global step {step}, {summary['wall_s']:.1f} s, mode {mode}"]
    if not has_trained:  # by ps and workers; what a client has made of its ops is its own
        lines = [*causes, f"{outcome.replace('Training', 'Run', 1)}; {summary['wall_s']:.1f} s"]
    lost = "interrupted" if summary["error"] == "interrupted" else "did not end properly"
    if summary["ok"] and summary.get("lacks_records"):
        lost = "its records could not be written"
    lines += [worker_line(report, lost) for report in workers]
    if summary.get("restarts_by_task"):
        lines.append(f"Started again: {restarts(msgspec.convert(summary['restarts_by_task'], dict[str, int]))}")
    if summary.get("virtual_gpus"):
        lines.append(f"GPUs are virtual (--virtual-gpus): {summary['virtual_gpus']} devices on the cards there are")
    if summary.get("slow"):
        lines.append(f"Slowed on purpose (--slow): {summary['slow']}")
    if summary.get("chaos"):
        injected = msgspec.convert(summary["chaos"], list[faults.Injected])
        lines.append(f"Faults injected (--chaos): {faults.told(injected)}")
    model = newest_checkpoint(paths)
    older = without(model, msgspec.convert(step, int))
    if summary["error"] == NOT_SAVED:
        older = ", which is not the final one"
    if summary.get("model"):
        far = "" if Path(str(summary["model"])).is_dir() else "; copy it here to go on from it with --resume"
        lines.append(f"Model: {summary['model']}, because the run folder took no more{far}")
    elif has_trained or model:
        lines.append(f"Model: {shown(model)}{older}" if model else "Model: none was saved")
    lines += [f"Picture: {shown(path)}" for path in sorted(paths.root.glob("*.png"))]  # that the script has left there
    lines.append(f"Run folder: {shown(paths.root)} (summary.json, and what the tasks printed in logs/)")
    going_on = how_to_go_on(bool(summary["ok"]), bool(model or summary.get("model")), has_trained)
    going_on += ", once that is put right" if will_repeat else ""
    going_on += change_first(model)
    lines += [f"{going_on}: {resume}"] if resume else []
    return "\n".join(lines)


def how_to_go_on(is_ok: bool, has_model: bool, has_trained: bool = True) -> str:
    """What the command of the last line is for. A run that has done all that its script asks for goes on only when the
    script asks for more.

    >>> how_to_go_on(False, True), how_to_go_on(False, False)
    ('To resume', 'To start over')
    >>> how_to_go_on(True, False, has_trained=False)
    'To run it again'
    """
    if is_ok and not has_model and not has_trained:
        return "To run it again"
    if not has_model:
        return "To start over"
    return "To train further (more epochs or steps)" if is_ok else "To resume"


def change_first(model: Path | None) -> str:
    """Say which line of the script must be changed before it can be resumed; empty if none."""
    state = read.state_of(model) if model is not None else None
    return f", {state.loop.change}, then" if state is not None and state.loop.begins_again else ""


def without(model: Path | None, global_step: int) -> str:
    """What of the training is not in the newest checkpoint, where something is not.

    >>> without(Path("step-00000450"), 464)
    ', without the last 14 of the 464 steps: they are lost'
    """
    saved = step_of(model) if model is not None else None
    if saved is None or saved >= global_step:
        return ""
    return f", without the last {global_step - saved} of the {global_step} steps: they are lost"


def restarts(by_task: Mapping[str, int]) -> str:
    """Who came back how often.

    >>> restarts({"ps:0": 1, "worker:1": 2})
    'ps:0 1x, worker:1 2x'
    """
    return ", ".join(f"{task} {count}x" for task, count in by_task.items())


def worker_line(report: WorkerReport, lost: str = "did not end properly") -> str:
    """One worker's share, with a dash for what it could not tell; `lost`: why one has not told its end.

    >>> worker_line(WorkerReport(index=0, task="worker:0", steps=12, metrics={"loss": 0.5}))
    '  worker:0  12 steps  - samples/s  step - ms  loss 0.5'
    >>> worker_line(WorkerReport(index=1, task="worker:1", ops="serves"))
    '  worker:1  ran ops for others'
    """
    if report.ops:
        did = "ran ops for others" if report.ops == SERVES else "was the client"
        return f"  {report.task}  {did}" + (f"  ({lost})" if report.is_lost else "")
    rate = "-" if report.samples_per_s is None else f"{report.samples_per_s:.0f}"
    step_ms = "-" if report.step_ms is None else f"{report.step_ms.median:.2f}"
    discarded = f" ({report.discarded} discarded)" if report.discarded else ""
    where = f" on {report.device}" if "gpu" in report.device else ""
    parts = [f"{report.task}{where}  {report.steps} steps{discarded}  {rate} samples/s  step {step_ms} ms"]
    parts += [metrics(report.metrics)] if report.metrics else []
    parts += [f"({lost})"] if report.is_lost else []
    return "  " + "  ".join(parts)


def metrics(values: Metrics) -> str:
    """Logged values in few characters.

    >>> metrics({"loss": 0.123456, "accuracy": None})
    'loss 0.1235  accuracy nan'
    """
    return "  ".join(f"{name} {'nan' if value is None else format(value, '.4g')}" for name, value in values.items())


def newest_checkpoint(paths: RunPaths) -> Path | None:
    """What `--resume auto` would go on from, as far as sizes tell."""
    try:
        return read.newest(paths.checkpoints)
    except OSError:
        return None


def shown(path: Path) -> str:
    """A path as the user would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
