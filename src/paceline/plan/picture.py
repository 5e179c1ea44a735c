"""HOW does a plan look? The curve of samples/s over workers, with the knees, as plan.svg and plan.png.

Called by cli/plan. Draws what the plan says, and decides nothing.
"""

from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.plan.planning import Curve, Plan

COLOURS = ("#2f62a8", "#38853a", "#b06a12", "#8e3a8e", "#c62828", "#4a4a4a")
LINES = ("-", "--", ":", "-.")


def check() -> None:
    """A UsageError where the drawing package is missing; before anything is calibrated."""
    if find_spec("matplotlib") is None:
        raise UsageError("A picture needs matplotlib: pip install 'paceline[lab]', or leave out --out.")


def draw(plan: Plan, folder: Path) -> list[Path]:
    """plan.svg and plan.png."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    colours = dict(zip(dict.fromkeys(curve.num_ps for curve in plan.curves), cycle(COLOURS), strict=False))
    lines = dict(zip(dict.fromkeys(curve.mode for curve in plan.curves), cycle(LINES), strict=False))
    for curve in plan.curves:
        _line(axes, curve, colours[curve.num_ps], lines[curve.mode])
    counts = plan.wanted.workers
    ideal = [plan.base.samples_per_s * count for count in counts]
    axes.plot(counts, ideal, color="#bdbdbd", linewidth=1, label="one worker's, times workers", zorder=1)
    _recommended(axes, plan)
    _axes(axes, plan)
    paths = [folder / "plan.svg", folder / "plan.png"]
    for path in paths:
        figure.savefig(path, dpi=110)
    return paths


def _line(axes: Any, curve: Curve, colour: str, line: str) -> None:
    counts = [point.topology.num_workers for point in curve.points]
    rates = [point.samples_per_s for point in curve.points]
    label = f"{curve.num_ps} ps, {curve.mode}"
    axes.plot(counts, rates, color=colour, linestyle=line, marker=".", markersize=4, label=label, zorder=3)
    if curve.knee is not None:
        axes.plot([curve.knee], [_at(counts, rates, curve.knee)], marker="o", markersize=9, markerfacecolor="white",
                  markeredgecolor=colour, markeredgewidth=1.8, linestyle="none", zorder=4)  # fmt: skip


def _at(counts: list[int], rates: list[float], count: int) -> float:
    """On the line between two points."""
    for left, right, low, high in zip(counts, counts[1:], rates, rates[1:], strict=False):
        if left <= count <= right:
            return low + (high - low) * (count - left) / (right - left)
    return rates[-1]


def _recommended(axes: Any, plan: Plan) -> None:
    if plan.recommended is not None:
        at = plan.recommended
        axes.plot([at.topology.num_workers], [at.samples_per_s], marker="*", markersize=15, color="#f2b705",
                  markeredgecolor="#7a5c00", linestyle="none", label="recommended", zorder=5)  # fmt: skip


def _axes(axes: Any, plan: Plan) -> None:
    most = max(plan.wanted.workers)
    if most > 32:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(plan.wanted.workers, [str(count) for count in plan.wanted.workers], fontsize=8)
        axes.minorticks_off()
    else:
        axes.set_xticks(plan.wanted.workers)
        rates = [point.samples_per_s for curve in plan.curves for point in curve.points]
        axes.set_ylim(0, 1.25 * max(rates))
    axes.set_xlabel("workers")
    axes.set_ylabel("samples/s (those that count)")
    where = f"a host each, {plan.wanted.link}" if plan.wanted.link else f"one machine, {plan.wanted.lane}"
    axes.set_title(f"Predicted, {where}, {plan.wanted.cores} cores; ○ knee: a further worker hardly pays", fontsize=10)
    axes.grid(color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
