"""DO the code blocks of docs/ingraph.md run? All but those that name hosts that are not there."""

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ingraph.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
RUN = [block for block in BLOCKS if "hostA" not in block]


def test_most_blocks_can_be_run() -> None:
    assert len(RUN) == len(BLOCKS) - 1 == 3


@pytest.mark.parametrize("number", range(len(RUN)))
def test_a_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["page.py"])
    monkeypatch.setattr("sys.excepthook", lambda *args: None)  # a server in a script changes it; here nobody should
    path = tmp_path / "block.py"
    path.write_text(RUN[number] if "import paceline" in RUN[number] else "import paceline\n" + RUN[number])
    runpy.run_path(str(path))
