"""WHAT does a user's own file ask for? `paceline lab run mine.toml`: its keys, checked, and where a wrong one stands.

Called by lab/run; lab/matrices/user_matrix makes cells of it. Must never start anything; every mistake is one sentence
that names the file, the line and the key.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spelling import hint
from paceline.cluster.toml_text import line_of, table_of
from paceline.errors import UsageError

Value = str | int | float | bool
KEYS = (
    "name", "script", "args", "quick_args", "seeds", "seed_flag", "limit_s", "reps", "beside", "compare", "axes",
)  # fmt: skip
COMPARED = ("epoch_s", "step_ms", "wall_s")
COUNTS = ("ps", "workers")
OWN = "args"  # the table below [axes] whose keys are the script's own flags
NOT_AXES = ("run_id", "run_dir", "plain", "started_workers", "resume")
_KINDS = {f.name: f.type for f in msgspec.structs.fields(Settings) if f.name not in NOT_AXES}
AXES = (*COUNTS, *_KINDS)
_PLAIN = Settings(run_id="")
_NAME, _NOT_NAME = re.compile(r"\w[\w.+-]*"), re.compile(r"[^\w.+-]+")  # of a matrix: a folder has it


class UserFile(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: a script, and the values of every axis."""

    name: str
    script: str
    args: tuple[str, ...] = ()
    quick_args: tuple[str, ...] = ()  # after `args`, with --quick
    seeds: tuple[int, ...] = ()  # none: once, and the script is told nothing
    seed_flag: str = "--seed"  # "": the script is not told
    limit_s: float = 120.0
    reps: int = 7
    beside: dict[str, Value] | None = None  # the cell that all others are compared with
    compare: str = "epoch_s"
    axes: dict[str, tuple[Value, ...]] = {}  # ps, workers and the flags of `paceline run`
    own: dict[str, tuple[Value, ...]] = {}  # the script's flags
    places: dict[str, str] = {}  # where keys and axes stand, the script's own with a leading "--"

    def place(self, *names: str) -> str:
        """Where the first of these that is known stands, for the beginning of a sentence; "" for none of them."""
        return next((f"{self.places[name]}: " for name in names if name in self.places), "")


def flag_of(own: str) -> str:
    """How an axis of the script's own is typed.

    >>> flag_of("hidden"), flag_of("--hidden")
    ('--hidden', '--hidden')
    """
    return f"--{own.removeprefix('--')}"


def load(path: Path) -> UserFile:
    """Read and check a file; the script lies where the file says, seen from its folder."""
    if not path.is_file():
        raise UsageError(f"There is no file {path}; a matrix of your own is described in a TOML file (docs/lab.md).")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from None
    asked = parse(text, str(path))
    script = (path.parent / asked.script).absolute()
    if not script.is_file():
        line = line_of(text, "script")
        raise UsageError(f"{path}, line {line}: script is {asked.script!r}, and there is no file {script}.")
    name = asked.name or _NOT_NAME.sub("-", path.stem).strip("-.")
    if not _NAME.fullmatch(name):
        raise UsageError(f'{path}: no folder can be named after this file; give it a name: name = "mine".')
    return msgspec.structs.replace(asked, script=str(script), name=name)


def parse(text: str, where: str) -> UserFile:
    """What the text of a file asks for; a UsageError names `where`, the line and the key.

    >>> parse('script = "train.py"\\n[axes]\\nworkers = [1, 2]', "mine.toml").axes
    {'workers': (1, 2)}
    """
    return _Reader(text, where).read()


class _Reader:
    """One file; knows where its keys stand."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where

    def wrong(self, path: Sequence[str], why: str) -> UsageError:
        return UsageError(f"{self.place(*path)}: {why}.")

    def place(self, *path: str) -> str:
        return f"{self._where}, line {line_of(self._text, *path)}"

    def read(self) -> UserFile:
        given = table_of(self._text, self._where)
        self._known((), given, KEYS)
        if "script" not in given:
            raise UsageError(f"{self._where} has no key 'script'; say which script to run: script = \"train.py\".")
        axes = self._table(given, "axes")
        own = axes.pop(OWN, {})
        if not isinstance(own, dict):
            raise self.wrong(("axes", OWN), f"axes.{OWN} is a table of the script's own flags: [axes.{OWN}]")
        settled = {str(key).replace("-", "_"): (key, value) for key, value in axes.items()}
        self._known(("axes",), settled, (*AXES, OWN))
        found = UserFile(
            name=self._name(given),
            script=self._string(given, "script", ""),
            args=self._words(given, "args"),
            quick_args=self._words(given, "quick_args"),
            seeds=self._seeds(given),
            seed_flag=self._string(given, "seed_flag", "--seed"),
            limit_s=float(self._positive(given, "limit_s", 120.0)),
            reps=self._whole(given, "reps", 7),
            compare=self._string(given, "compare", "epoch_s"),
            axes={name: self._axis(name, ("axes", key), value) for name, (key, value) in settled.items()},
            own={str(name): self._axis(None, ("axes", OWN, name), value) for name, value in own.items()},
            places={
                **{key: self.place(key) for key in given},
                **{name: self.place("axes", key) for name, (key, _) in settled.items()},
                **{flag_of(name): self.place("axes", OWN, name) for name in own},
            },
        )
        if found.compare not in COMPARED:
            raise self.wrong(("compare",), f"compare is {found.compare!r}; {hint(found.compare, COMPARED)}")
        return self._with_beside(found, self._table(given, "beside")) if "beside" in given else found

    def _known(self, path: tuple[str, ...], given: Iterable[str], valid: Sequence[str]) -> None:
        for key in given:
            if key not in valid:
                known = axis_hint(key, valid) if path else hint(key, valid)
                raise self.wrong((*path, key), f"there is no {'axis' if path else 'key'} {key!r}; {known}")

    def _string(self, given: Mapping[str, object], key: str, default: str) -> str:
        value = given.get(key, default)
        if not isinstance(value, str):
            raise self.wrong((key,), f"{key} is {value!r}; it must be a text in quotes")
        return value

    def _table(self, given: Mapping[str, object], key: str) -> dict[str, object]:
        value = given.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong((key,), f"{key} is {value!r}; it must be a table")
        return dict(value)

    def _name(self, given: Mapping[str, object]) -> str:
        name = self._string(given, "name", "")
        if name and not _NAME.fullmatch(name):
            raise self.wrong(("name",), f"name is {name!r}; it names a folder: letters, digits, - and _ only")
        return name

    def _words(self, given: Mapping[str, object], key: str) -> tuple[str, ...]:
        value = given.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str | int | float) for each in value):
            raise self.wrong((key,), f'{key} is {value!r}; it must be a list of texts, such as ["--epochs", "2"]')
        return tuple(str(each) for each in value)

    def _whole(self, given: Mapping[str, object], key: str, default: int) -> int:
        value = given.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong((key,), f"{key} is {value!r}; it must be a whole number, 1 or more")
        return value

    def _positive(self, given: Mapping[str, object], key: str, default: float) -> float:
        value = given.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong((key,), f"{key} is {value!r}; it must be a number of seconds above 0")
        return value

    def _seeds(self, given: Mapping[str, object]) -> tuple[int, ...]:
        value = given.get("seeds", ())
        if isinstance(value, int) and not isinstance(value, bool):
            return tuple(range(self._whole(given, "seeds", 1)))
        listed = tuple(value) if isinstance(value, list) else ()
        is_right = len(set(map(str, listed))) == len(listed) and all(type(each) is int for each in listed)
        if "seeds" in given and not (listed and is_right):
            raise self.wrong(("seeds",), f"seeds is {value!r}; it must be a number, such as 3, or a list of seeds")
        return listed

    def _axis(self, name: str | None, path: tuple[str, ...], value: object) -> tuple[Value, ...]:
        """One axis; a value that stands alone is a list of one."""
        values = value if isinstance(value, list) else [value]
        shown = ".".join(path[1:])
        if not values:
            raise self.wrong(path, f"axis {shown} is empty; give it a value, or leave it out")
        try:
            read = tuple(value_of(name, each) for each in values)
        except ValueError as error:
            raise self.wrong(path, f"axis {shown} {error}") from None
        if len({str(each) for each in read}) < len(read):
            raise self.wrong(path, f"axis {shown} has a value twice")
        return read

    def _with_beside(self, found: UserFile, beside: Mapping[str, object]) -> UserFile:
        """`beside` with the names that the axes have; each value is one of its axis."""
        every = {**found.axes, **found.own}
        read: dict[str, Value] = {}
        for key, value in beside.items():
            name = key if key in every else key.replace("-", "_")
            if name not in every:
                raise self.wrong(("beside", key), f"beside names {key!r}, which is no axis here; {hint(key, every)}")
            among = [each for each in every[name] if each == value]
            if not among:
                have = ", ".join(map(repr, every[name]))
                raise self.wrong(("beside", key), f"beside has {key} = {value!r}, and the axis has {have}")
            read[name] = among[0]
        return msgspec.structs.replace(found, beside=read)


def value_of(name: str | None, value: object, is_text: bool = False) -> Value:
    """A value of an axis; None: of the script's own. ValueError says what is wrong. "" is the flag's default.

    >>> value_of("staleness", "3", is_text=True), value_of("workers", 2), value_of("lane", "tcp")
    (3, 2, 'tcp')
    """
    if not isinstance(value, str | int | float):
        raise ValueError(f"has {value!r}; a value is a text, a number, true or false")
    if name is None:
        return value
    if name in COUNTS:
        return _count(value, is_text)
    if value == "":
        return ""
    if _KINDS[name] is str:
        return str(value)
    try:
        read: Value = msgspec.convert(value, _KINDS[name], strict=not is_text)
    except msgspec.ValidationError as error:
        raise ValueError(f"has {value!r}: {str(error)[:1].lower()}{str(error)[1:]}") from None
    return read


def _count(value: Value, is_text: bool) -> int:
    count = int(value) if is_text and isinstance(value, str) and value.isdecimal() else value
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"has {value!r}; it must be a whole number, 1 or more")
    return count


def default_of(name: str) -> Value:
    """What a run has that is not told otherwise."""
    found: Value = {"ps": 1, "workers": 2}[name] if name in COUNTS else getattr(_PLAIN, name)
    return found


def replaced(asked: UserFile, sets: Mapping[str, Sequence[str]]) -> UserFile:
    """The file with these values in place of its axes' (--set); an axis it does not have is added."""
    axes, own, places = dict(asked.axes), dict(asked.own), dict(asked.places)
    for given, texts in sets.items():
        name = given.replace("-", "_")
        is_own = given in own
        if not is_own and name not in AXES:
            raise UsageError(f"--set: there is no axis {given!r}; {axis_hint(given, [*own, *AXES])}.")
        try:
            values = tuple(_own_value(own[given], text) if is_own else value_of(name, text, True) for text in texts)
        except ValueError as error:
            raise UsageError(f"--set: {given} {error}.") from None
        (own if is_own else axes)[given if is_own else name] = values
        places[flag_of(given) if is_own else name] = f"--set {given}={','.join(texts)}"
    changed = msgspec.structs.replace(asked, axes=axes, own=own, places=places)
    for name, value in (asked.beside or {}).items():
        if value not in {**axes, **own}[name]:
            raise UsageError(
                f"--set leaves out {name}={value}, which the others are compared with (beside); name it too."
            )
    return changed


def axis_hint(name: str, valid: Iterable[str]) -> str:
    """What to do about an axis that there is not: the nearest name, else where a flag of the script belongs.

    >>> axis_hint("hidden", AXES)
    'a flag of the script belongs into [axes.args]; [axes] is for ps, workers and flags of `paceline run`'
    """
    known = hint(name.replace("-", "_"), valid)
    own = f"flag of the script belongs into [axes.{OWN}]"
    near, is_near, _ = known.partition("? (valid: ")
    return f"{near}? A {own}" if is_near else f"a {own}; [axes] is for ps, workers and flags of `paceline run`"


def _own_value(known: Sequence[Value], text: str) -> Value:
    """The value of the file that is written so, else the text itself."""
    return next((value for value in known if str(value).lower() == text.lower()), text)
