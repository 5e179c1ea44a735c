"""WHAT is in a checkpoint? `paceline ckpt ls|inspect|verify|diff|export`, on the files of a run, also while it trains.

Called by cli/main. Must never change a checkpoint, and must never import torch. Exit codes: 0 fine, 1 damaged or
different, 2 the question could not be answered.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from paceline.cli.table import print_table
from paceline.errors import CheckpointError, UsageError
from paceline.telemetry.output import complain, json_text

if TYPE_CHECKING:
    from paceline.checkpoint.read import Found, Loaded
    from paceline.checkpoint.state import State

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into checkpoints, check and export them.")

NOT_THE_SAME = 1  # damaged, or different
BY_SIZE = "whole by size"  # nothing was hashed

WHERE = "A run folder (or its name under runs/), a checkpoints folder, or one checkpoint."
Where = Annotated[str, typer.Argument(metavar="RUN|FOLDER|PATH", help=WHERE)]
First = Annotated[str, typer.Argument(metavar="A", help=WHERE)]
Second = Annotated[str, typer.Argument(metavar="B", help="The other one, named in the same way.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The new file, or the folder it goes into.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Format = Annotated[str, typer.Option("--format", metavar="safetensors|numpy", help="What kind of file.")]
Ema = Annotated[bool, typer.Option("--ema", help="The averaged parameters, of a run with --ema.")]
Model = Annotated[bool, typer.Option("--model", help="Only the model: neither optimizer nor averages.")]


@app.command("ls")
def ls(where: Where) -> None:
    """List the checkpoints, the newest first, as manifests and sizes tell; `ckpt verify` checks the hashes."""
    print_table(("step", "lineage", "written", "size", "state", "path"), [_row(found) for found in _all(where)])


@app.command("inspect")
def inspect(where: Where, json: Json = False) -> None:
    """Print what one checkpoint holds: where training was, and every tensor. Of several, the newest."""
    loaded = _one(where)
    from paceline.checkpoint import state as states
    from paceline.checkpoint.compare import files

    tensors = [(file, name, entry) for file, named in files(loaded).items() for name, entry in named.items()]
    if json:
        state = msgspec.Raw(states.encode(loaded.state))
        listed = [
            {"file": file, "name": name, "dtype": entry.dtype, "shape": entry.shape, "size_bytes": entry.size_bytes}
            for file, name, entry in tensors
        ]
        whole = {"path": str(loaded.path), "state": state, "manifest": loaded.manifest, "tensors": listed}
        print(json_text(whole, indent=2))
        return
    for name, said in described(loaded):
        print(f"{name}: {said}")
    rows = [
        (file, name, "x".join(map(str, entry.shape)) or "scalar", entry.dtype, str(entry.size_bytes))
        for file, name, entry in tensors
    ]
    print_table(("file", "name", "shape", "dtype", "bytes"), rows)


@app.command("verify")
def verify(where: Where) -> None:
    """Hash every file of every checkpoint there; exit code 1 when one is not what was written."""
    from paceline.checkpoint.read import verify as problems_of

    damaged = 0
    found = _all(where)
    if not found:
        raise UsageError(f"There is no checkpoint in {where}.")
    for each in found:
        problems = problems_of(each.path)
        damaged += bool(problems)
        for problem in problems:
            print(f"{each.path}: damaged: {problem}")
        if not problems:
            print(f"{each.path}: whole")
    if damaged:
        complain(f"{damaged} of {len(found)} checkpoints {'is' if damaged == 1 else 'are'} damaged.")
        raise typer.Exit(NOT_THE_SAME)


@app.command("diff")
def diff(a: First, b: Second, model: Model = False) -> None:
    """Compare two checkpoints tensor by tensor, bit for bit; exit code 1 when they differ."""
    first, second = _one(a), _one(b)
    from paceline.checkpoint.compare import compare, files

    print(f"A: {first.path} (step {first.state.global_step})")
    print(f"B: {second.path} (step {second.state.global_step})")
    differences = compare(first, second, is_model_only=model)
    if not differences:
        count = len(first.model) if model else sum(len(tensors) for tensors in files(first).values())
        print(f"The same: {count} tensors, bit for bit.")
        return
    rows = [
        (
            d.file,
            d.name,
            d.what,
            "" if d.max_abs is None else f"{d.max_abs:.3g}",
            "" if d.first is None else str(list(d.first)),
        )
        for d in differences
    ]
    print_table(("file", "name", "what differs", "largest difference", "first at"), rows)
    raise typer.Exit(NOT_THE_SAME)


@app.command("export")
def export(where: Where, out: Out, format: Format = "safetensors", ema: Ema = False) -> None:
    """Write the model of one checkpoint as a plain file; of several, the newest."""
    loaded = _one(where)
    from paceline.checkpoint.export import export as write

    try:
        path = write(loaded, Path(out), format, use_averages=ema)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    print(f"{path}: {len(loaded.model)} tensors of step {loaded.state.global_step}, {size(path.stat().st_size)}")
    if format == "numpy" and any(entry.dtype == "bfloat16" for entry in loaded.model.values()):
        print("numpy has no bfloat16: those tensors are float32 there.", file=sys.stderr)


def described(loaded: "Loaded") -> list[tuple[str, str]]:
    """What is not a tensor, a line each."""
    state, manifest = loaded.state, loaded.manifest
    shards = ", ".join(f"ps:{s.index} at version {s.version}" for s in state.shards)
    return [
        ("checkpoint", str(loaded.path)),
        ("format", str(manifest.format)),
        ("global step", f"{state.global_step} (lineage {state.lineage})"),
        ("run", f"{state.run_id} (paceline {state.paceline})"),
        ("mode", str(state.mode)),
        ("optimizer", f"{state.optimizer}, {len(state.groups)} parameter group{'s' * (len(state.groups) != 1)}"),
        ("seed", str(state.seed)),
        ("ps", f"{state.num_ps}{': ' * bool(shards)}{shards}"),
        ("workers", str(state.num_workers)),
        *_positions(state),
        *((name, size(said.size_bytes)) for name, said in manifest.files.items()),
    ]


def _positions(state: "State") -> list[tuple[str, str]]:
    return [
        (f"worker:{w.index}", f"epoch {w.epoch}, {w.batch} batches taken, {w.steps} steps in all")
        for w in state.workers
    ]


def size(size_bytes: int) -> str:
    """Bytes for people.

    >>> size(318040), size(99)
    ('318.0 kB', '99 B')
    """
    value = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{size_bytes} B"
        value /= 1000
    return f"{value:.1f} GB"


def _row(found: "Found") -> tuple[str, ...]:
    step = str(found.global_step)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.path.stat().st_mtime))
    lineage = str(found.lineage) if found.lineage >= 0 else ""
    if found.manifest is None:
        return step, lineage, written, "", f"damaged: {found.problem}", str(found.path)
    return step, lineage, written, size(found.manifest.size_bytes), BY_SIZE, str(found.path)


def place(where: str) -> tuple[Path, bool]:
    """(folder, is it one checkpoint?) of what a user named; UsageError when it is neither."""
    from paceline.checkpoint.manifest import MANIFEST, step_of

    for path in (Path(where), Path("runs") / where):
        if not path.is_dir():
            continue
        if step_of(path) is not None or (path / MANIFEST).exists():
            return path, True
        if (path / "checkpoints").is_dir():
            return path / "checkpoints", False
        if path.name == "checkpoints" or any(step_of(child) is not None for child in path.iterdir()):
            return path, False
    raise UsageError(f"No checkpoint at {where!r}: give a run folder, a checkpoints folder, or one step-… folder.")


def _all(where: str) -> "list[Found]":
    from paceline.checkpoint.read import examine, find

    path, is_one = place(where)
    return [examine(path.resolve())] if is_one else newest_first(find(path))


def newest_first(found: "list[Found]") -> "list[Found]":
    """By lineage, then by step, damaged ones in their place; one that tells no lineage is taken to be of the newest."""
    newest = max((each.lineage for each in found), default=0)
    return sorted(found, key=lambda f: (f.lineage if f.lineage >= 0 else newest, f.global_step), reverse=True)


def _one(where: str) -> "Loaded":
    """The checkpoint that was named, or the newest of those there, every file checked."""
    from paceline.checkpoint.read import load, load_newest

    path, is_one = place(where)
    try:
        loaded = load(path) if is_one else load_newest(path, warn=lambda line: print(line, file=sys.stderr))
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    if loaded is None:
        raise UsageError(f"No whole checkpoint in {path}.")
    return loaded
