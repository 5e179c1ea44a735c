"""HOW does a model leave a checkpoint? As one plain file: safetensors, or numpy's npz.

Called by `paceline ckpt export`. Never overwrites a file, and leaves none that is half written.
"""

import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from paceline.checkpoint.read import Loaded
from paceline.checkpoint.store import write_tensors
from paceline.checkpoint.tensors import Entry, values
from paceline.errors import CheckpointError, UsageError

SUFFIXES = {"safetensors": ".safetensors", "numpy": ".npz"}


def export(loaded: Loaded, out: Path, format: str, use_averages: bool = False) -> Path:
    """Write the model, or its averaged parameters, into the file `out`, or as model.* into the folder `out`."""
    if format not in SUFFIXES:
        raise UsageError(f"--format is {format!r}; use one of {', '.join(SUFFIXES)}.")
    tensors = dict(loaded.model)
    if use_averages:
        if loaded.averages is None:
            raise UsageError(f"{loaded.path} holds no averages: its run had no --ema. Leave --ema out.")
        tensors.update(loaded.averages)
    path = out / f"model{SUFFIXES[format]}" if out.is_dir() else out
    if path.exists():
        raise UsageError(f"{path} is there already; remove it, or give another name.")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if format == "numpy":
            _write_npz(draft, tensors)
        else:
            write_tensors(draft, tensors)
        os.rename(draft, path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            draft.unlink()
    return path


def _write_npz(path: Path, tensors: Mapping[str, Entry]) -> None:
    """As numpy.savez does, which cannot take every name (one called `file`, say) and would pickle if it had to."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, entry in tensors.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values(entry), allow_pickle=False)
