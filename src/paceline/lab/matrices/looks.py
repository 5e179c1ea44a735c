"""WHAT is looked at in what a run said? A line that must be there, a number and its range, a time beside another.

Used by lab/matrices/document_rows for every line and figure of the documents, judged by lab/matrices/documents. Pure:
no process, no file, no clock.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

import msgspec

from paceline.lab.matrices.wording import SAME, differences

YES, NO, OPEN = "✓", "✗", "–"
OTHER = "≠"  # printed, in other words
EPOCH = re.compile(r"^Epoch (\d+): .*?(\d+\.\d+) s$")
STEP = re.compile(r"Worker (\d+): trai\w* step (\d+) do\w+ \(global step: ?(\d+)\)")


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the documents' programs left."""

    command: str = ""  # what was typed
    seconds: float = 0.0
    logs: dict[str, list[str]] = {}  # by task, or by program where there are no tasks
    missing: str = ""  # why it cannot run here, which is nobody's fault
    failed: str = ""  # why it did not come to its end


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A run, the single process of the same side, and whether there was time enough to learn anything."""

    told: Told
    single: Told | None = None
    is_quick: bool = False


class Judged(msgspec.Struct, frozen=True):
    """A mark, and what was found."""

    mark: str
    result: str = ""

    def __str__(self) -> str:
        return f"{self.mark} {self.result}".rstrip()


class Look(Protocol):
    """How one row of the documents is compared with what a run said."""

    def judge(self, seen: Seen) -> Judged: ...


class Ended(msgspec.Struct, frozen=True):
    """It ran, and ended as it should; `but` says what of the document's did not run."""

    but: str = ""

    def judge(self, seen: Seen) -> Judged:
        return Judged(OPEN, self.but) if self.but else Judged(YES, f"{seen.told.seconds:.0f} s")


class Prints(msgspec.Struct, frozen=True):
    """A task says these lines of the document, in this order, and each is compared with it, word by word. A pattern
    finds the line that plays the part of each, whatever its words are."""

    task: str
    lines: tuple[str, ...]
    patterns: tuple[str, ...]

    def judge(self, seen: Seen) -> Judged:
        """
        >>> look = Prints("ps-0", ("job_name : ps", "task_index : 0"), ("job_name", "task_index"))
        >>> str(look.judge(Seen(told=Told(logs={"ps-0": ["job_name : ps", "task_index : 0"]}))))
        '✓ same: job_name : ps'
        >>> str(look.judge(Seen(told=Told(logs={"ps-0": ["job_name : ps", "task_index : 1"]}))))
        '≠ "1" for "0"'
        """
        printed = list(_log(seen.told.logs, self.task))
        found = []
        for pattern in self.patterns:
            at = next((number for number, line in enumerate(printed) if re.search(pattern, line)), None)
            if at is None:
                return Judged(NO, "not printed")
            found.append(printed[at].strip())
            printed = printed[at + 1 :]
        differ = [each for pair in zip(self.lines, found, strict=True) if (each := differences(*pair)) != SAME]
        return Judged(OTHER, "; ".join(differ)) if differ else Judged(YES, f"same: {found[0]}")


class Says(msgspec.Struct, frozen=True):
    """A task says a line like this, which is shown; it is compared with nothing."""

    task: str
    pattern: str

    def judge(self, seen: Seen) -> Judged:
        found = next((line for line in _log(seen.told.logs, self.task) if re.search(self.pattern, line)), None)
        return Judged(NO, "not printed") if found is None else Judged(YES, found.strip())


class Number(msgspec.Struct, frozen=True):
    """A number that a task prints last, and the range in which it must be when there was time enough."""

    task: str
    pattern: str
    low: float
    high: float

    def judge(self, seen: Seen) -> Judged:
        """
        >>> told = Told(logs={"worker-0": ["Test-Accuracy: 0.73"]})
        >>> str(Number("worker-0", r"Test-Accuracy: ([0-9.]+)", 0.69, 0.75).judge(Seen(told=told)))
        '✓ 0.73'
        """
        found = [re.search(self.pattern, line) for line in _log(seen.told.logs, self.task)]
        texts = [match[1] for match in found if match]
        if not texts:
            return Judged(NO, "not printed")
        if seen.is_quick:
            return Judged(OPEN, f"{texts[-1]} (too short to say)")
        return Judged(YES if self.low <= float(texts[-1]) <= self.high else NO, texts[-1])


class EpochTime(msgspec.Struct, frozen=True):
    """How many times the single process's epoch a worker's takes, first ones left out: at most as in the document."""

    task: str
    at_most: float
    is_first: bool = False  # its first epoch beside its others, instead

    def judge(self, seen: Seen) -> Judged:
        """
        >>> one, two = Told(logs={"single": ["Epoch 1: cost 1, 2.0 s"]}), Told(logs={"w": ["Epoch 1: cost 1, 3.0 s"]})
        >>> str(EpochTime("w", 2.9).judge(Seen(told=two, single=one)))
        '✓ 1.50x'
        """
        first, others = _epochs(seen.told.logs, self.task)
        if self.is_first:
            beside = others[1:] or others  # the second is not settled either
        else:
            beside = [] if seen.single is None else _typical(*_epochs(seen.single.logs, SINGLE))
        judged = first if self.is_first else _typical(first, others)
        if not judged or not beside:
            return Judged(OPEN, "no epochs to compare with")
        times = fmean(judged) / max(fmean(beside), 1e-9)
        if seen.is_quick:
            return Judged(OPEN, f"{times:.2f}x (too short to say)")
        return Judged(YES if times <= self.at_most else NO, f"{times:.2f}x")


class Shares(msgspec.Struct, frozen=True):
    """How two workers shared out a budget of steps by their speed."""

    low: float
    high: float

    def judge(self, seen: Seen) -> Judged:
        """
        >>> logs = {"worker-0": ["1.0: Worker 0: traing step 8 dome (global step:9)"],
        ...         "worker-1": ["1.0: Worker 1: training step 2 done (global step: 10)"]}
        >>> str(Shares(3.5, 5).judge(Seen(told=Told(logs=logs))))
        '✓ 8 + 2'
        """
        counts = []
        for task in ("worker-0", "worker-1"):
            made = [STEP.search(line) for line in _log(seen.told.logs, task)]
            counts.append(max((int(match[2]) for match in made if match), default=0))
        if not all(counts):
            return Judged(NO, "no counts printed")
        result = f"{counts[0]} + {counts[1]}"
        if seen.is_quick:
            return Judged(OPEN, f"{result} (too short to say)")
        return Judged(YES if self.low <= counts[0] / counts[1] <= self.high else NO, result)


SINGLE = "single"  # the task's name of a process alone


def _log(logs: Mapping[str, Sequence[str]], task: str) -> Sequence[str]:
    return logs.get(task, ())


def _epochs(logs: Mapping[str, Sequence[str]], task: str) -> tuple[list[float], list[float]]:
    """What epoch 1 took, where it is in the log, and what the others took."""
    matches = [match for line in _log(logs, task) if (match := EPOCH.search(line))]
    first = [float(match[2]) for match in matches if int(match[1]) == 1]
    return first, [float(match[2]) for match in matches if int(match[1]) != 1]


def _typical(first: list[float], others: list[float]) -> list[float]:
    return others or first  # one that loads and compiles tells nothing about the rest
