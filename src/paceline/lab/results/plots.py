"""HOW does a number look? Draws the pictures of lab/results/series with matplotlib, all in one look, as SVG and as PNG.

Called by lab/results/report. Must never open a window, keep a figure, or treat a name as mathematics: names are the
user's.
"""

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from paceline.lab.results.drawables import Bars, Group, Line, Lines, Picture

COLOURS = (
    "#2f62a8", "#e08a1e", "#38853a", "#c62828", "#7b52ab", "#00808a", "#8a5a2b", "#d4589c", "#777777", "#a3a311",
)  # fmt: skip
OF_PART = {"wait": "#c4c4c4"}  # time in which nothing is done
LOG = 4.0  # times: lines that end so far apart need it to be seen
MARKERS = "osD^vPX*<>"
GREY, PALE = "#666666", "#dddddd"
WIDTH_IN, BAR_IN, PNG_DPI = 7.6, 0.26, 130
WRAP = 40  # letters of a category's name in one line
MANY = 60  # categories; beyond, the picture says that some are left out
LOOK: Any = {  # matplotlib types every key of it
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, and the page is small
    "svg.hashsalt": "paceline",  # the same picture is the same file
}


def svg(picture: Picture) -> str:
    """The picture as text that can stand in a page: no prolog, ids that no other picture has."""
    with rc_context(LOOK):
        return _svg(picture, _figure(picture))


def _svg(picture: Picture, figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for before in ('id="', 'href="#', "url(#"):
        text = text.replace(before, f"{before}{picture.name}-")
    return text.replace("'DejaVu Sans'", "'DejaVu Sans', Helvetica, Arial, sans-serif")


def save(picture: Picture, folder: Path) -> str:
    """Write NAME.svg and NAME.png; the SVG's text comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(LOOK):
        figure = _figure(picture)
        text = _svg(picture, figure)
        folder.joinpath(f"{picture.name}.svg").write_text(text + "\n", encoding="utf-8")
        figure.savefig(folder / f"{picture.name}.png", dpi=PNG_DPI)
    return text


def _figure(picture: Picture) -> Figure:
    return (
        _lines(picture) if isinstance(picture, Lines) else _upright(picture) if picture.is_upright else _bars(picture)
    )


def _canvas(height_in: float, title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(textwrap.wrap(title, 80)), x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    return figure, figure.add_subplot()


def _legend(figure: Figure, axes: Any, labels: Sequence[str]) -> None:
    """Below the picture, where it covers nothing; with one name there is nothing to tell apart."""
    if len(labels) < 2:
        return
    columns = 1 if max(map(len, labels)) > 50 else 2 if max(map(len, labels)) > 22 else min(4, len(labels))
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(handles, [textwrap.shorten(label, 90) for label in labels], loc="outside lower left", ncols=columns)


# --- lines ------------------------------------------------------------------------------------------------------------


def _lines(picture: Lines) -> Figure:
    figure, axes = _canvas(3.3 + 0.11 * len(picture.lines), picture.title)
    for number, line in enumerate(picture.lines):
        is_point = len(line.x) == 1  # several may lie on each other: hollow, each larger than the one before
        axes.plot(*_finite(line), color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
                  markersize=6 + number if is_point else 4, fillstyle="none" if is_point else "full",
                  linewidth=1.4, label=f" {line.label}")  # fmt: skip
    labels = [line.label for line in picture.lines]
    if picture.ideal is not None:
        axes.plot(*_finite(picture.ideal), color=GREY, linewidth=1, linestyle=":", label=f" {picture.ideal.label}")
        labels.append(picture.ideal.label)
    if picture.is_doubled:
        known = sorted({x for line in picture.lines for x in line.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(known, [f"{x:g}" for x in known])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    elif not picture.is_counted and is_wide(picture.lines):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())  # matplotlib's own are mathematics
        axes.grid(which="minor", axis="x", linewidth=0.3)
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.y_label)
    if picture.is_counted:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    _legend(figure, axes, labels)
    return figure


def is_wide(lines: Sequence[Line]) -> bool:
    """Whether some lines end long before others: on even paper they would be a stroke.

    >>> is_wide([Line("a", (1.0, 2.0), (0.0, 0.0)), Line("b", (1.0, 9.0), (0.0, 0.0))])
    True
    """
    ends = [max(line.x) for line in lines if len(line.x) > 1]
    starts = [min(line.x) for line in lines]
    return len(ends) > 1 and min(starts) > 0 and max(ends) > LOG * min(ends)


def _finite(line: Line) -> tuple[list[float], list[float]]:
    kept = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


# --- bars -------------------------------------------------------------------------------------------------------------


def _bars(picture: Bars) -> Figure:
    """One below the other, the first at the top; names to the left."""
    names = ["\n".join(textwrap.wrap(name, WRAP)) for name in picture.categories[:MANY]]
    rows = 1 if picture.is_stacked else len(picture.groups)
    left_out = len(picture.categories) - len(names)
    title = picture.title + (f" (the first {MANY} of {len(picture.categories)})" if left_out else "")
    heights = [max(BAR_IN * (0.5 + 0.75 * rows), 0.165 * (name.count("\n") + 1) + 0.05) for name in names]
    figure, axes = _canvas(1.2 + sum(heights), title)
    places = [sum(heights[:at]) + heights[at] / 2 for at in range(len(heights))]
    thick = BAR_IN * 0.72
    base = [0.0] * len(names)
    for number, group in enumerate(picture.groups):
        values = [_known(value) for value in group.values[:MANY]]
        shift = 0.0 if picture.is_stacked else (number - (rows - 1) / 2) * thick
        at = [place + shift for place in places]
        colour = OF_PART.get(group.label, COLOURS[number % len(COLOURS)])
        axes.barh(at, values, height=thick * 0.94, left=base if picture.is_stacked else None, label=f" {group.label}",
                  color=colour, **_errors(group, len(names)))  # fmt: skip
        if picture.is_stacked:
            base = [before + value for before, value in zip(base, values, strict=True)]
        else:
            _numbers(axes, at, group, len(names))
    axes.set_yticks(places, names)
    axes.set_ylim(sum(heights), 0)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(picture.unit)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    if picture.mark is not None:
        axes.axvline(picture.mark, color=GREY, linewidth=1, linestyle="--")
    _legend(figure, axes, [group.label for group in picture.groups])
    return figure


def _known(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _errors(group: Group, count: int) -> dict[str, Any]:
    if not group.errors:
        return {}
    both = [error or (0.0, 0.0) for error in group.errors[:count]]
    return {
        "xerr": ([below for below, _ in both], [above for _, above in both]),
        "error_kw": {"ecolor": GREY, "elinewidth": 1, "capsize": 2},
    }


def _numbers(axes: Any, places: Sequence[float], group: Group, count: int) -> None:
    """The value at the end of each bar, beyond its line."""
    for at, (place, value) in enumerate(zip(places, group.values[:count], strict=True)):
        if value is not None and math.isfinite(value):
            error = group.errors[at] if group.errors else None
            axes.annotate(shown(value), (value + (error[1] if error else 0.0), place), xytext=(4, 0), fontsize=8,
                          textcoords="offset points", va="center", color=GREY)  # fmt: skip


def shown(value: float) -> str:
    """
    >>> shown(0.123), shown(12.34), shown(1234.5)
    ('0.12', '12.3', '1234')
    """
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _upright(picture: Bars) -> Figure:
    """From left to right: categories that are numbers themselves."""
    figure, axes = _canvas(3.1 + 0.11 * len(picture.groups), picture.title)
    wide = 0.84 / len(picture.groups)
    for number, group in enumerate(picture.groups):
        places = [at + (number - (len(picture.groups) - 1) / 2) * wide for at in range(len(picture.categories))]
        axes.bar(places, [_known(value) for value in group.values], width=wide * 0.94, label=f" {group.label}",
                 color=COLOURS[number % len(COLOURS)])  # fmt: skip
    axes.set_xticks(range(len(picture.categories)), picture.categories)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.unit)
    _legend(figure, axes, [group.label for group in picture.groups])
    return figure
