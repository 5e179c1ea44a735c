"""HOW does a mode look? Writes docs/pictures/*.svg, one timeline a scene of timeline.py.

Run by `make pictures`, and by a test that compares what comes out with what is here. Must never decide anything, nor
draw anything but what the story tells: a picture that is edited by hand is no evidence.
"""

import sys
from html import escape
from pathlib import Path

from timeline import SCENES, Push, Story, played

from paceline.wire.frames import Outcome

COLOURS = (  # a worker's bars, their edge, and bars whose work was lost
    ("#a9c8ee", "#2f62a8", "#edf3fb"),
    ("#b4dfaa", "#38853a", "#eff8ec"),
    ("#f6cf9c", "#b06a12", "#fdf4e7"),
)
DARK, GREY, PALE, RED = "#222222", "#777777", "#bdbdbd", "#c62828"
WIDTH, LEFT, RIGHT = 900, 96, 880
PS_Y, FIRST_Y, ROW, BAR = 86, 126, 46, 28  # where the ps is, the first worker; from row to row; height of a bar
LETTER = 6.4  # width of a letter of the legend, about
HATCH = (
    '<defs><pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4f4f4"/><rect width="2" height="6" fill="#bdbdbd"/></pattern></defs>'
)


class Drawing:
    """One story as SVG, from the back to the front."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._scene = story.scene
        self._lines: list[str] = []
        self._bottom = FIRST_Y + ROW * (len(story.scene.times) - 1) + BAR

    def svg(self) -> str:
        height = self._bottom + 66
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(self._scene.title)}</title>",
            HATCH,
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        ]
        self._text(12, 26, self._scene.title, 16, DARK, 'font-weight="bold"')
        self._text(12, 46, self._scene.flags, 12.5, GREY, 'font-family="monospace"')
        self._axes()
        self._switch()
        for push in self._story.pushes:
            self._way(push)
        self._updates()
        for push in self._story.pushes:
            self._bar(push)
        self._legend(self._bottom + 52)
        return "\n".join([*self._lines, "</svg>", ""])

    # --- pieces -----------------------------------------------------------------------------------------------

    def _x(self, at_s: float) -> float:
        return round(LEFT + min(at_s / self._scene.until_s, 1) * (RIGHT - LEFT), 1)

    def _y(self, worker: int) -> int:
        return FIRST_Y + ROW * worker

    def _line(
        self, start: tuple[float, float], stop: tuple[float, float], stroke: str, width: float, more: str = ""
    ) -> None:
        ends = f'x1="{start[0]}" y1="{start[1]}" x2="{stop[0]}" y2="{stop[1]}"'
        self._lines.append(f'<line {ends} stroke="{stroke}" stroke-width="{width}" {more}/>')

    def _rect(self, left: float, top: float, right: float, height: float, fill: str, stroke: str) -> None:
        box = f'x="{left}" y="{top}" width="{round(right - left, 1)}" height="{height}"'
        self._lines.append(f'<rect {box} rx="4" fill="{fill}" stroke="{stroke}"/>')

    def _text(self, x: float, y: float, said: str, size: float, fill: str, more: str = "") -> None:
        self._lines.append(f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" {more}>{escape(said)}</text>')

    def _cross(self, x: float, y: float) -> None:
        self._line((x - 6, y - 6), (x + 6, y + 6), RED, 2.4)
        self._line((x - 6, y + 6), (x + 6, y - 6), RED, 2.4)

    # --- the story --------------------------------------------------------------------------------------------

    def _axes(self) -> None:
        self._text(12, PS_Y + 5, "ps", 13, DARK, 'font-weight="bold"')
        self._line((LEFT, PS_Y), (RIGHT, PS_Y), GREY, 1)
        for worker in range(len(self._scene.times)):
            self._text(12, self._y(worker) + 19, f"worker {worker}", 13, COLOURS[worker][1], 'font-weight="bold"')
        y = self._bottom + 14
        self._text(12, y + 4, "time", 12, GREY)
        self._line((LEFT, y), (RIGHT, y), GREY, 1)
        self._lines.append(f'<path d="M{RIGHT} {y} l-7 -3.5 v7 z" fill="{GREY}"/>')

    def _switch(self) -> None:
        if self._story.switched_s is None or self._scene.then is None:
            return
        y = self._bottom + 14
        for at_s, said in ((self._scene.switch_s, "asked for"), (self._story.switched_s, f"{self._scene.then} holds")):
            self._line((self._x(at_s), y), (self._x(at_s), FIRST_Y - 8), RED, 1.4, 'stroke-dasharray="6 3"')
            self._text(self._x(at_s), y + 14, said, 11, RED)

    def _way(self, push: Push) -> None:
        """From the worker up to the ps, when it has computed."""
        if push.stop_s < self._scene.until_s and push.outcome is not Outcome.DISCARDED:
            x, colour = self._x(push.stop_s), COLOURS[push.worker][1]
            self._line((x, PS_Y), (x, self._y(push.worker)), colour, 1, 'opacity="0.45"')
            self._lines.append(f'<circle cx="{x}" cy="{PS_Y}" r="3" fill="{colour}"/>')

    def _updates(self) -> None:
        for update in self._story.updates:
            x, push = self._x(update.at_s), update.push
            colour = DARK if push is None else COLOURS[push.worker][1]
            said = f"v{update.version}" if push is None else str(push.staleness)
            self._line((x, PS_Y - 11), (x, PS_Y + 11), colour, 3)
            self._text(x, PS_Y - 16, said, 11, colour, 'font-weight="bold" text-anchor="middle"')
            if push is None:
                self._line((x, PS_Y + 11), (x, self._bottom + 4), GREY, 1, 'stroke-dasharray="3 3"')

    def _bar(self, push: Push) -> None:
        fill, edge, lost = COLOURS[push.worker]
        left, right, y = self._x(push.start_s) + 1, self._x(push.stop_s) - 1, self._y(push.worker)
        is_lost = push.outcome is Outcome.DISCARDED
        self._rect(left, y, right, BAR, lost if is_lost else fill, edge)
        for step in range(1, self._scene.own_steps):
            x = self._x(push.start_s + step * (push.stop_s - push.start_s) / self._scene.own_steps)
            if x < right - 1:
                self._line((x, y + 4), (x, y + BAR - 4), edge, 1)
        said = f"v{push.base}"
        if right - left > 12 + 7 * len(said):
            self._text(left + 6, y + 18, said, 11, DARK)
        if is_lost:
            self._cross(round((left + right) / 2, 1), y + BAR / 2)
        until = self._x(self._scene.until_s if push.goes_on_s is None else push.goes_on_s)
        if until - right > 4:
            self._rect(right + 2, y + 6, until - 1, BAR - 12, "url(#waits)", PALE)

    # --- the legend -------------------------------------------------------------------------------------------

    def _legend(self, y: int) -> None:
        pushes, x = self._story.pushes, 12.0
        what = "computes" if self._scene.own_steps == 1 else f"{self._scene.own_steps} steps of its own"
        self._rect(x, y - 13, x + 28, 18, "#eeeeee", GREY)
        self._text(x + 7, y, "v1", 11, DARK)
        x = self._said(x + 36, y, f"{what}, from version 1")
        if any(push.goes_on_s is not None and push.goes_on_s > push.stop_s for push in pushes):
            self._rect(x, y - 12, x + 28, 16, "url(#waits)", PALE)
            x = self._said(x + 36, y, "waits")
        if any(update.push is None for update in self._story.updates):
            self._line((x + 8, y - 13), (x + 8, y + 5), DARK, 3)
            self._text(x + 13, y, "v1", 11, DARK, 'font-weight="bold"')
            x = self._said(x + 32, y, "a round's update, to version 1")
        if any(push.staleness is not None for push in pushes):
            self._line((x + 8, y - 13), (x + 8, y + 5), COLOURS[0][1], 3)
            self._text(x + 13, y, "2", 11, COLOURS[0][1], 'font-weight="bold"')
            x = self._said(x + 26, y, "an update, its gradient 2 versions old")
        if any(push.outcome is Outcome.DISCARDED for push in pushes):
            self._cross(x + 8, y - 4)
            self._said(x + 24, y, "discarded")

    def _said(self, x: float, y: int, said: str) -> float:
        """Returns where the next item begins."""
        self._text(x, y, said, 12, DARK)
        return round(x + LETTER * len(said) + 18, 1)


def main(folder: Path) -> None:
    for name, scene in SCENES.items():
        (folder / f"{name}.svg").write_text(Drawing(played(scene)).svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
