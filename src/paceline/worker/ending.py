"""End a worker: report and leave; the last worker to leave writes the final checkpoint. After Ctrl+C the chief saves.

Called by worker/session when the script ends, and by worker/preparation when this worker had ended before.
"""

import threading
from typing import TYPE_CHECKING, NoReturn

import msgspec

from paceline.errors import NotSaved, UsageError
from paceline.telemetry.lines import FailedAt, failed_line
from paceline.wire import messages as m
from paceline.worker.requests.link import ClosedAlready

if TYPE_CHECKING:
    from paceline.worker.session import WorkerSession
    from paceline.worker.step.training_step import TrainingStep

CLOSE_S = 60.0  # how long the end waits for a checkpoint that is being written
FAILED_CLOSE_S = 5.0  # and after an error
INTERRUPTED_SAVE_S = 10.0  # how long Ctrl+C waits for the last one
JUST_S = 5.0  # and how old one may be that needs no other


def end(session: "WorkerSession", is_ok: bool, is_interrupted: bool) -> None:
    """End what a worker that has joined has begun; after an error, say where it was, and let the ps see a death."""
    training_step = session.training_step
    if training_step is None:
        return
    if is_ok:
        leave(session, training_step)
    elif is_interrupted and session.is_chief and _saves(session):
        _save_in_time(session, training_step)
    elif not is_interrupted:
        session.say(failed_line(_failed_at(session, training_step)))


def leave(session: "WorkerSession", training_step: "TrainingStep") -> None:
    """Send what is left and close; save the final model if all others have closed."""
    refused = training_step.finish()
    links = training_step.client.links
    counts = [(link.channel.lane, link.counts()) for link in links]
    report = session.reporter.end(training_step, counts)
    if session.is_chief:
        training_step.send_carried()
    training_step.refresh()  # this carries ps:0's open decisions to all shards
    saves = _saves(session)
    session.send_position(session.here())
    saved_at = -1
    if session.is_chief and saves:  # the last worker saves at the end, but it may never get there
        is_last = training_step.client.status().live == [
            session.worker_index
        ]  # the others have said what they end with
        if session.save(session.here()) is not None and is_last:
            saved_at = links[0].version
    told = [link.close_run(m.Close()).report for link in links[1:]]
    closed = links[0].close_run(m.Close(msgspec.json.encode(report), told))
    if closed.is_last and saves:
        training_step.client.pull()  # our end may have closed a round with the gradient of one that died
        if links[0].version != saved_at and session.save(session.here(), is_final=True) is None:
            version = links[0].version
            raise NotSaved(f"the final model, of global step {version}, could not be saved: {session.not_saved}")
    if refused is not None:
        raise refused


def end_for_good(session: "WorkerSession", training_step: "TrainingStep", closed: ClosedAlready) -> NoReturn:
    """End a worker whose earlier start has closed, but was killed before it had ended: the last to close may still
    have had to save. A worker that was started by hand is told that it is done."""
    if session.require_cluster().source != "launcher":
        raise closed
    session.say(f"paceline: {closed}")
    session.training_step = training_step
    if closed.reply.is_last and _saves(session) and session.save(None, is_final=True) is None:
        raise NotSaved(f"the final model could not be saved: {session.not_saved}")
    session.training_step = None  # it has no connection to close
    session.reporter.sink.event("done")
    raise SystemExit(0)


def _saves(session: "WorkerSession") -> bool:
    return session.require_cluster().settings.save_every != "none" and session.paths is not None


def _failed_at(session: "WorkerSession", training_step: "TrainingStep") -> FailedAt:
    progress, steps = session.progress, int(training_step.steps)
    batch = (progress.epoch, progress.passes, progress.batch) if progress.is_in_pass else None
    return FailedAt(step=steps, step_of_start=steps - session.clock.earlier, batch=batch)


def _save_in_time(session: "WorkerSession", training_step: "TrainingStep") -> None:
    """Save what the ps have after Ctrl+C, within a few seconds: all workers leave now, and the ps soon after.
    The training's connections stopped in the middle of anything; the saver has its own. A checkpoint that the launcher
    has just had saved is better: it holds the position of every worker."""
    is_launched = session.require_cluster().source == "launcher"
    if is_launched and session.saver is not None and session.saver.has_just_saved(JUST_S, INTERRUPTED_SAVE_S):
        return
    session.say("Interrupted: saving before the end")
    position, saver = session.here(), session.make_saver()
    assert saver is not None
    try:
        saver.carried = training_step.carried_block()
    except UsageError as refused:
        session.say(f"paceline: buffers are saved as ps:0 has them: {refused}")
    writing = threading.Thread(target=_try_save, args=(session, position), name="last save", daemon=True)
    writing.start()
    writing.join(INTERRUPTED_SAVE_S)
    if writing.is_alive():
        session.say(f"paceline: the checkpoint was not written within {INTERRUPTED_SAVE_S:g} s, so it is left out")


def _try_save(session: "WorkerSession", position: m.Position) -> None:
    saved = session.save(position, is_final=True)
    if saved is not None:
        session.say(f"Saved: {saved}")
