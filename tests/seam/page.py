"""Render the table as docs/seam.md: `python tests/seam/page.py`, with tests/numerics on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "numerics")]

from table import CASES, Different, Refused  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "seam.md"

HEAD = """# What PyTorch scripts do, and what a cluster makes of it

Each row is a small program. `tests/seam` runs it as plain PyTorch, on **1 worker** (async, 1 ps) and on **2 workers**
(sync, 2 ps, beside two plain processes whose gradients are averaged before each step), and compares every number that
it returns, and the checkpoint:

- **equal**: the same bits.
- **refused**: the run ends with an error that names what was done, the line of the script and what to do
  instead. The model that was trained until then is saved.
- **different**: other numbers, for the reason beside it.
- **–**: there is no plain PyTorch of two workers to compare with.

{total} rows: {equal} equal, {refused} refused, {different} different. This page is made by `python tests/seam/page.py`.
"""


def page() -> str:
    """Return the page's text."""
    cases = list(CASES.values())
    kinds = [{type(each.one), type(each.two)} for each in cases]
    text = [
        HEAD.format(
            total=len(cases),
            equal=sum(each.is_equal for each in cases),
            refused=sum(Refused in kind for kind in kinds),
            different=sum(Different in kind and Refused not in kind for kind in kinds),
        )
    ]
    for topic in sorted({each.topic for each in cases}):
        text.append(f"\n## {topic}\n\n| the script has or does | 1 worker | 2 workers | |\n|---|---|---|---|\n")
        rows = [each for each in cases if each.topic == topic]
        text += [
            f"| {each.name.replace('|', chr(92) + '|')} | {each.one.word} | {each.two.word} | {each.note} |\n"
            for each in rows
        ]
    return "".join(text)


if __name__ == "__main__":
    import children
    import data
    import gradients
    import libraries
    import loops
    import models
    import optimizers
    import parameters
    import writes

    TOPICS = (optimizers, parameters, writes, gradients, models, loops, data, children, libraries)
    PAGE.write_text(page())
