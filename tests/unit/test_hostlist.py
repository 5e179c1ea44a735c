"""WHICH hosts does Slurm's short spelling mean? Beside `scontrol show hostnames`, where Slurm is installed."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.hostlist import MOST, counts, expand
from paceline.errors import UsageError

# What `scontrol show hostnames` of Slurm 22.05 printed.
BY_SCONTROL = {
    "a[1-2]b[3-4]": "a1b3 a1b4 a2b3 a2b4",
    "h[08-11]": "h08 h09 h10 h11",
    "h[8-11]": "h8 h9 h10 h11",
    "h[001-3]": "h001 h002 h003",
    "h[1,3-4,07]": "h1 h3 h4 h07",
    "x,y[1-2],x": "x y1 y2 x",
    "127.0.0.[2-3]": "127.0.0.2 127.0.0.3",
    "h[9-010]": "h9 h10",
    "h[1-2][3-4]": "h13 h14 h23 h24",
    "h[01-02,3]": "h01 h02 h3",
    "a,,b": "a b",
    "": "",
}


@pytest.mark.parametrize("text", BY_SCONTROL)
def test_as_scontrol_has_it(text: str) -> None:
    assert expand(text) == BY_SCONTROL[text].split()


@pytest.mark.parametrize("text", ["h[3-1]", "a[1-2", "h[]", "h[a-b]", "h1]", "h[1-2-3]", "h[1,]", "h[[1]]", "h[-1]"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UsageError, match=r"no list of hosts as Slurm writes them"):
        expand(text)


@pytest.mark.parametrize("text", ["h[0-999999999]", "h[1-300][1-300]", ",".join(["h[1-60000]"] * 2)])
def test_endless_lists_are_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError):
        expand(text)
    assert len(expand(f"h[1-{MOST}]")) == MOST


NUMBERS = st.integers(0, 120)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One item in brackets, and the numbers it means."""
    first, width = draw(NUMBERS), draw(st.integers(1, 4))
    last = first + draw(st.integers(0, 12))
    low = str(first).zfill(width)
    if draw(st.booleans()):
        return low, [low]
    return f"{low}-{last}", [str(number).zfill(len(low)) for number in range(first, last + 1)]


@st.composite
def hosts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A host, or several by one or two brackets."""
    text = draw(st.sampled_from(["h", "rack-", "a.b"]))
    names = [text]
    for _ in range(draw(st.integers(0, 2))):
        items = draw(st.lists(ranges(), min_size=1, max_size=3))
        inside = [number for _, numbers in items for number in numbers]
        middle = draw(st.sampled_from(["", "x"]))
        text += f"{middle}[{','.join(item for item, _ in items)}]"
        names = [f"{name}{middle}{number}" for name in names for number in inside]
    return text, names


@given(st.lists(hosts(), min_size=1, max_size=3))
def test_any_nesting_of_ranges(parts: list[tuple[str, list[str]]]) -> None:
    assert expand(",".join(text for text, _ in parts)) == [name for _, names in parts for name in names]


@given(st.text(alphabet="h0129[]-, x(", max_size=20))
def test_any_text_is_a_list_or_a_sentence(text: str) -> None:
    with suppress(UsageError):
        assert all(name and "[" not in name and "," not in name for name in expand(text))


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm is not installed: apt-get install slurm-client")
def test_any_list_as_the_real_scontrol_has_it(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n")

    @settings(max_examples=30, deadline=None)
    @given(st.lists(hosts(), min_size=1, max_size=2))
    def same(parts: list[tuple[str, list[str]]]) -> None:
        text = ",".join(part for part, _ in parts)
        told = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={"SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert told.returncode == 0, told.stderr
        assert expand(text) == told.stdout.split()

    same()


def test_tasks_on_each_host() -> None:
    assert counts("2(x3),1") == [2, 2, 2, 1] and counts("1") == [1] and counts("1,2") == [1, 2]
    for text in ("", "x", "2(x)", "2(3)", "1(x99999999)", "-1", "1(x99999),1(x99999)"):
        with pytest.raises(UsageError, match="how many tasks"):
            counts(text)
