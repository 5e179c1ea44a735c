"""Capture and restore the random generators that a torch training loop draws from, as plain bytes.

Used by worker/positions/position at the loop boundary that a checkpoint remembers, and when training goes on from
there. Bytes only: nothing that could be run comes back from a checkpoint, and a state that does not fit is refused.
"""

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paceline.errors import CheckpointError

CUDA = "cuda:"
_PYTHON = struct.Struct("<B?d")  # its version, whether a second gauss number waits, that number
_NUMPY = struct.Struct("<i?d")  # position, whether a second gauss number waits, that number
WORDS = 624

Generators = Mapping[str, torch.Generator]  # beside the global ones: a loader's, a sampler's
_States = tuple[Any, ...]  # torch's, and where they are wanted numpy's and Python's
Rng = dict[str, bytes]  # a generator's name -> its state


def capture(own: Generators) -> Rng:
    """Return all states now: torch's, numpy's and Python's global ones, those of devices in use, and `own`."""
    states = {"torch": _bytes(torch.get_rng_state()), "numpy": _numpy_state(), "python": _python_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            states[f"{CUDA}{index}"] = _bytes(torch.cuda.get_rng_state(index))
    for name, generator in own.items():
        states[name] = _bytes(generator.get_state())
    return states


def restore(states: Mapping[str, bytes], own: Generators) -> None:
    """Set every generator that was captured and is here."""
    try:
        for name, state in states.items():
            if name == "torch":
                torch.set_rng_state(_tensor(state))
            elif name == "numpy":
                _set_numpy(state)
            elif name == "python":
                _set_python(state)
            elif name in own:
                own[name].set_state(_tensor(state))
            elif name.startswith(CUDA) and torch.cuda.is_available():
                index = int(name.removeprefix(CUDA))
                if index < torch.cuda.device_count():
                    torch.cuda.set_rng_state(_tensor(state), index)
    except (ValueError, RuntimeError, TypeError, struct.error) as error:
        raise CheckpointError(f"a random generator's state in the checkpoint is not one: {error}.") from error


class Apart:
    """Put the global generators on the CPU at a place of their own while this is entered; `seed` decides what is drawn.
    `is_torch_alone` leaves out numpy's and Python's, which takes a tenth of a millisecond less."""

    def __init__(self, seed: int, is_torch_alone: bool = False) -> None:
        self._seed = seed
        self._is_torch_alone = is_torch_alone
        self._inside: _States | None = None
        self._outside: _States | None = None

    def __enter__(self) -> None:
        self._outside = self._states()
        if self._inside is not None:
            self._set(self._inside)
            return
        torch.default_generator.manual_seed(self._seed)
        if not self._is_torch_alone:
            random.seed(self._seed)
            if self._outside[1]["bit_generator"] == "MT19937":
                np.random.seed(self._seed % (1 << 32))

    def __exit__(self, *error: object) -> None:
        assert self._outside is not None
        self._inside = self._states()
        self._set(self._outside)

    def _states(self) -> _States:
        if self._is_torch_alone:
            return (torch.get_rng_state(),)
        return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()

    def _set(self, states: _States) -> None:
        torch.set_rng_state(states[0])
        if not self._is_torch_alone:
            np.random.set_state(states[1])
            random.setstate(states[2])


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _python_state() -> bytes:
    version, words, waits = random.getstate()
    return _PYTHON.pack(version, waits is not None, waits or 0.0) + np.array(words, dtype="<u4").tobytes()


def _set_python(state: bytes) -> None:
    version, has_waiting, waits = _PYTHON.unpack_from(state)
    words = np.frombuffer(state, dtype="<u4", offset=_PYTHON.size)
    random.setstate((version, tuple(words.tolist()), waits if has_waiting else None))


def _numpy_state() -> bytes:
    name, words, position, has_waiting, waits = np.random.get_state(legacy=True)
    if name != "MT19937":
        return b""  # another kind of generator was put there: it keeps its own place
    return _NUMPY.pack(position, bool(has_waiting), waits) + np.asarray(words, dtype="<u4").tobytes()


def _set_numpy(state: bytes) -> None:
    if not state:
        return
    position, has_waiting, waits = _NUMPY.unpack_from(state)
    words = np.frombuffer(state, dtype="<u4", offset=_NUMPY.size)
    if len(words) != WORDS:
        raise ValueError(f"numpy's has {WORDS} words, not {len(words)}")
    np.random.set_state(("MT19937", words, position, int(has_waiting), waits))
