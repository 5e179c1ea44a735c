"""HOW is a plan told? The lines of its table, plan.json, and a calibration that is read back.

Called by cli/plan. Must never round anything in the file, nor decide anything.
"""

import tempfile
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.plan.costs import FORMAT, Costs
from paceline.plan.planning import Plan, rate
from paceline.plan.simulate import Prediction

MUCH_REST = 0.2  # of a step
HEAD = ("workers", "ps", "mode", "step ms", "samples/s", "efficiency", "stale", "p95", "discarded", "limited by")


def head(plan: Plan) -> tuple[str, ...]:
    return (*HEAD, "cost per 1M") if plan.wanted.price is not None else HEAD


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """One line a topology; a star marks the recommended one, a ring a knee."""
    return [
        _row(plan, point, curve.knee == point.topology.num_workers) for curve in plan.curves for point in curve.points
    ]


def _row(plan: Plan, point: Prediction, is_knee: bool) -> tuple[str, ...]:
    topology = point.topology
    is_recommended = plan.recommended is not None and plan.recommended.topology == topology
    mark = " ★" if is_recommended else " ○" if is_knee else ""
    cells = (
        f"{topology.num_workers}{mark}",
        str(topology.num_ps),
        str(topology.mode),
        f"{point.step_ms:.3g}" if point.step_ms < 1000 else f"{point.step_ms:.0f}",
        rate(point.samples_per_s),
        f"{100 * (point.efficiency or 0):.0f} %",
        f"{point.staleness_mean:.1f}",
        f"{point.staleness_p95:.0f}",
        f"{100 * point.discarded:.0f} %",
        point.limit,
    )
    return (*cells, f"{point.cost or 0:.3g}") if plan.wanted.price is not None else cells


def costs_lines(costs: Costs, used_lane: str) -> list[str]:
    """What the prediction rests on."""
    samples = (
        f"{costs.batch:g} sample{'s' * (costs.batch != 1)} a step{', so samples/s are steps/s' * (costs.batch == 1)}"
    )
    lines = [
        f"A step of one worker: {costs.compute_ms + costs.device_ms:.3g} ms computing, with its next batch, "
        f"{costs.apply_ms:.3g} ms update on the ps; {costs.size_bytes / 1e6:.3g} MB of parameters, "
        f"{samples}; {costs.threads} thread{'s' * (costs.threads > 1)} a task.",
    ]
    lane = costs.lanes.get(used_lane)
    if lane is not None:
        lines.append(
            f"An exchange over {used_lane}: {lane.push_ms:.3g} ms push, {lane.read_ms:.3g} ms pull, "
            f"{lane.message_ms:.3g} ms a message on the ps, {lane.bulk_ms:.3g} ms for its bytes, "
            f"{lane.wake_ms:.3g} ms waking; {lane.rest_ms:.3g} ms of a step are none of these."
        )
    if costs.contention:
        lines.append(f"With all cores busy each is {100 * costs.contention:.0f} % slower.")
    lines += _doubt(costs)
    if costs.shared_spread > costs.spread:
        lines.append(
            f"Computing differs by {100 * costs.spread:.0f} % from step to step, where workers share the machine by "
            f"{100 * costs.shared_spread:.0f} %."
        )
    return lines


def _doubt(costs: Costs) -> list[str]:
    """Where much of a measured step is in none of its parts."""
    seen = costs.seen.alone_ms if costs.seen is not None else {}
    shares = [costs.lanes[lane].rest_ms / step_ms for lane, step_ms in seen.items() if step_ms > 0]
    if max(shares, default=0.0) < MUCH_REST:
        return []
    return [
        f"{100 * max(shares):.0f} % of a step of one worker is in none of its parts: other programs ran meanwhile, or "
        "the machine has fewer cores than it says. Calibrate again when it is quiet."
    ]


def made_folder(path: Path) -> Path:
    """Where files can be written: tried before anything is calibrated."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}; give a folder that you may write to.") from None


def keep(costs: Costs, folder: Path) -> None:
    """As soon as they are known: a simulation that is given up costs no second calibration."""
    (folder / "calibration.json").write_bytes(_json(costs))


def write(plan: Plan, folder: Path) -> Path:
    """plan.json."""
    path = folder / "plan.json"
    path.write_bytes(_json(plan))
    return path


def _json(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


class _Kept(msgspec.Struct, frozen=True):
    costs: Costs


def read_costs(path: Path) -> Costs:
    """Of an earlier plan.json or calibration.json."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--calibration {path}: {error.strerror}; give a calibration.json of an earlier plan."
        ) from None
    try:
        costs = msgspec.json.decode(data, type=Costs)
    except msgspec.MsgspecError:
        try:
            costs = msgspec.json.decode(data, type=_Kept).costs
        except msgspec.MsgspecError as error:
            raise UsageError(f"--calibration {path} is no calibration ({error}); make it again.") from None
    if costs.format != FORMAT:
        raise UsageError(f"--calibration {path} is of another version of paceline; make it again.")
    return costs
