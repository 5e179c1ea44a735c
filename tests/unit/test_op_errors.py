"""WHAT does a client hear of an op that failed, or is not there? Its own class, its text whatever that is, its task."""

import importlib
from pathlib import Path

import pytest
from op_servers import Serving, double, refuses, serving

import paceline
from paceline.errors import PacelineError, RemoteOpError, UsageError
from paceline.ingraph import op
from paceline.ingraph.graph import Graph
from paceline.ingraph.session import Session

__all__ = ["serving"]
TASK_1 = "/job:worker/task:1"
DEVICE_1 = "/job:worker/replica:0/task:1"


class ConnectionLost(Exception):
    """A program's own, which happens to have the name of one of ours."""


class Picky(UsageError):
    """A program's own, made of one of ours."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@paceline.op
def fails_as(kind: str) -> None:
    raise {
        "namesake": ConnectionLost("the modem"),
        "subclass": Picky("not like that"),
        "surrogate": ValueError("before \ud800 after"),
        "mute": Mute(),
    }[kind]


def error_of_call(kind: str) -> BaseException:
    with pytest.raises(Exception) as caught, paceline.device(TASK_1):
        fails_as(kind)
    return caught.value


def error_of_step(serving: Serving, kind: str) -> BaseException:
    graph = Graph()
    with graph, paceline.device(TASK_1):
        bad = fails_as(kind)
    with Session(serving.target(0), graph) as session, pytest.raises(Exception) as caught:
        session.run(bad)
    return caught.value


@pytest.mark.parametrize("way", ["call", "step"])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("namesake", "ConnectionLost: the modem"),
        ("subclass", "Picky: not like that"),
        ("surrogate", "ValueError: before \\ud800 after"),
        ("mute", "Mute: <its text cannot be made>"),
    ],
)
def test_an_ops_own_error_comes_back_whatever_its_name_and_text(
    serving: Serving, way: str, kind: str, told: str
) -> None:
    serving.start(0, 1)
    error = error_of_call(kind) if way == "call" else error_of_step(serving, kind)
    assert type(error) is RemoteOpError and error.task == DEVICE_1
    assert f"failed on {DEVICE_1}: {told}" in str(error)
    assert "in fails_as" in error.remote_traceback, "with its traceback"
    with paceline.device(TASK_1):
        assert double(2) == 4, "the task goes on"


def test_our_own_error_comes_back_as_what_it_is(serving: Serving) -> None:
    serving.start(1)
    with pytest.raises(PacelineError, match=r"^not today$") as caught, paceline.device(TASK_1):
        refuses()
    assert type(caught.value) is PacelineError


# --- an op that is not there ------------------------------------------------------------------------------------------


@paceline.op
def looks_up(name: str) -> str:
    """As an op does that is given the name of another one (a loss, a maker of models)."""
    return op.find(name).name


def test_an_op_missing_where_another_op_looks_for_it_names_that_task(serving: Serving) -> None:
    serving.start(1)
    told = f"Op 'work:loss' is not registered on {DEVICE_1}: that task must import 'work' itself"
    with pytest.raises(UsageError, match=told), paceline.device(TASK_1):
        looks_up("work:loss")


def test_an_op_missing_in_this_process_is_missing_here() -> None:
    with pytest.raises(UsageError, match="Op 'work:loss' is not registered here"):
        op.find("work:loss")


def test_of_many_ops_the_nearest_of_the_programs_own_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {f"work:loss{number}": double for number in range(30)}
    monkeypatch.setattr(op, "_OPS", {"paceline.ingraph.copies:tower": double, "zebra:x": double, **own})
    with pytest.raises(UsageError, match=r"did you mean 'work:loss\d+'\? .*, and 21 more\.$") as caught:
        op.find("work:loss")
    assert "paceline.ingraph" not in str(caught.value) and "zebra" not in str(caught.value)
    assert str(caught.value).count("work:loss") == 12, "the op itself, the guess and ten names"
    monkeypatch.setattr(op, "_OPS", {"paceline.ingraph.copies:tower": double})
    with pytest.raises(UsageError, match=r"it has registered no op of its own\.$"):
        op.find("work:loss")


# --- two ops of one name ----------------------------------------------------------------------------------------------


def test_two_ops_of_one_name_are_refused() -> None:
    @paceline.op(name="test:same")
    def one() -> None: ...

    with pytest.raises(UsageError, match="Two ops have the name 'test:same'"):

        @paceline.op(name="test:same")
        def two() -> None: ...

    assert op.find("test:same") is one


@pytest.mark.parametrize("thing", [3, "x", int])
def test_only_functions_are_ops(thing: object) -> None:
    with pytest.raises(UsageError, match="is for functions"):
        paceline.op(thing)  # type: ignore[call-overload]


def scaling(factor: int) -> "op.Op[[int], int]":
    @paceline.op
    def scaled(x: int) -> int:
        return factor * x

    return scaled


def plain() -> "op.Op[[int], int]":
    @paceline.op
    def same_again(x: int) -> int:
        return x

    return same_again


def test_two_functions_of_one_maker_do_not_replace_each_other() -> None:
    twice = scaling(2)
    with pytest.raises(UsageError, match=r"Two functions would be the op '.*scaled'.*@paceline.op\(name=…\)"):
        scaling(3)
    assert op.find(twice.name) is twice


def test_two_nameless_functions_do_not_replace_each_other() -> None:
    first = paceline.op(lambda x: x)
    with pytest.raises(UsageError, match=r"Two functions would be the op 'test_op_errors:.*<lambda>'"):
        paceline.op(lambda x: x + 1)
    assert op.find(first.name) is first


def test_the_same_function_made_again_is_no_second_one() -> None:
    plain()
    again = plain()
    assert op.find(again.name) is again


def test_a_module_imported_again_replaces_its_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_twice.py").write_text("import paceline\n\n@paceline.op\ndef f(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("imported_twice")
    (tmp_path / "imported_twice.py").write_text(
        "import paceline\n\n\n\n@paceline.op\ndef f(x):\n    return x + 1  # new\n"
    )
    module = importlib.reload(module)
    assert op.find("imported_twice:f") is module.f and module.f(1) == 2
