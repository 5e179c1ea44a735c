"""Share a DataLoader out: all workers take the same permutation, and each takes every n-th batch of it.

Called by ctx.prepare. Must never change what a single worker would see.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from paceline.errors import UsageError
from paceline.frameworks.torch import rng as torch_rng
from paceline.frameworks.torch.batch_sizes import sized_indices, sizes_of
from paceline.frameworks.torch.samples import GradientSamples
from paceline.telemetry.steps import StepClock
from paceline.wire.messages import BATCH
from paceline.worker.positions.position import Progress
from paceline.worker.script import script_line

Place = Callable[[], tuple[int, int]]  # which worker, of how many


class Shared:
    """Batches of which worker i of n takes i, i+n, i+2n, …; the last round is filled by wrapping."""

    def __init__(self, worker: int, num_workers: int, seed: int, place: Place | None) -> None:
        self.epoch = 0
        self._worker, self._num_workers = worker, num_workers
        self._seed = seed
        self._place = place

    def __len__(self) -> int:
        return -(-self._num_batches() // self._num_workers)

    def _num_batches(self) -> int:
        raise NotImplementedError

    def _begin(self) -> int:
        """Begin an epoch, at this worker's place in it; return the seed of its order."""
        if self._place is not None:
            self._worker, self._num_workers = self._place()
        self.epoch += 1
        return self._seed + self.epoch - 1


class SharedBatches(Shared):
    """Batches of indices, made here.

    >>> [list(SharedBatches(5, 1, False, w, 2, seed=0)) for w in (0, 1)]
    [[[0], [2], [4]], [[1], [3], [0]]]
    """

    def __init__(
        self, size: int, batch_size: int, shuffle: bool, worker: int, num_workers: int, seed: int,
        drop_last: bool = False, place: Place | None = None,
    ) -> None:  # fmt: skip
        super().__init__(worker, num_workers, seed, place)
        self.batch_size = batch_size
        self._size = size
        self._shuffle = shuffle
        self._drop_last = drop_last
        self.skip = 0  # batches that were taken before a restart, of the next epoch to begin

    def __iter__(self) -> Iterator[list[int]]:
        order, seed = list(range(self._size)), self._begin()
        skip, self.skip = self.skip, 0
        if self._shuffle:
            order = torch.randperm(self._size, generator=torch.Generator().manual_seed(seed)).tolist()
        count = self._num_batches()
        begin = self._worker + skip * self._num_workers
        for first in range(begin, len(self) * self._num_workers, self._num_workers):
            start = (first % count) * self.batch_size
            yield order[start : start + self.batch_size]

    def _num_batches(self) -> int:
        return self._size // self.batch_size if self._drop_last else -(-self._size // self.batch_size)


class EveryNth(Shared):
    """Batches of the user's own batch sampler, whose order must be the same on all workers. What it draws from the
    global generators is: they are exchanged for common ones meanwhile."""

    def __init__(self, batches: Any, worker: int, num_workers: int, place: Place | None = None, seed: int = 0) -> None:
        super().__init__(worker, num_workers, seed, place)
        self.of_script = batches

    def __getattr__(self, name: str) -> Any:
        if name == "of_script":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self.of_script, name)  # set_epoch(), say

    def _num_batches(self) -> int:
        return len(self.of_script)

    def __iter__(self) -> Iterator[Sequence[int]]:
        apart = torch_rng.Apart(self._begin(), _draws_from_torch(self.of_script))
        count = 0
        kept: list[Sequence[int]] = []
        for batch in drawing(self.of_script, apart):
            if count < self._num_workers:
                kept.append(batch)
            if count % self._num_workers == self._worker:
                yield batch
            count += 1
        in_last_round = count % self._num_workers  # so many workers have a batch in the round that is not full
        if 0 < in_last_round <= self._worker:
            yield kept[(self._worker - in_last_round) % len(kept)]


def drawing(batches: Iterable[Sequence[int]], apart: torch_rng.Apart) -> Iterator[Sequence[int]]:
    """Yield the batches, each drawn from the generators that are apart."""
    with apart:
        iterator = iter(batches)
    while True:
        with apart:
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def share(
    loader: DataLoader[Any], worker: int, num_workers: int, seed: int, data: str, say: Callable[[str], None],
    place: Place | None = None,
) -> DataLoader[Any]:  # fmt: skip
    """Return the loader that this worker iterates: the same one if it is alone or takes everything, else its share.
    `place` says at the start of every epoch which worker of how many this is, where workers come and go."""
    if num_workers == 1 or data == "full":
        return loader
    if isinstance(loader.dataset, IterableDataset):
        say("paceline: an iterable dataset is not shared out: every worker iterates all of it, unless it splits itself")
        return loader
    if loader.batch_size is None and loader.batch_sampler is None:
        say("paceline: a loader without batches is not shared out: every worker iterates all of it")
        return loader
    batches: Any
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        _check_own_share(sampler, worker, num_workers, is_elastic=place is not None)
        say("paceline: the DistributedSampler gives this worker its share; the loader is taken as it is")
        return loader
    if type(loader.batch_sampler) is BatchSampler and _takes_all_once(sampler) and loader.batch_size is not None:
        shuffle = type(sampler) is RandomSampler
        size = len(sampler)  # type: ignore[arg-type]
        batches = SharedBatches(size, loader.batch_size, shuffle, worker, num_workers, seed, loader.drop_last, place)
    else:
        say(
            "paceline: a sampler of your own is shared out batch by batch: it must give all workers the same order. "
            "What it draws from the global generators is the same for all; give one of your own the same seed"
        )
        batches = EveryNth(loader.batch_sampler, worker, num_workers, place, seed)
    return _with_batches(loader, batches)


def _check_own_share(sampler: "DistributedSampler[Any]", worker: int, num_workers: int, is_elastic: bool) -> None:
    """Refuse a sampler that gives another share than this worker's: some samples would never be seen."""
    if is_elastic or (sampler.num_replicas, sampler.rank) != (num_workers, worker):
        came = " and workers may come and go" if is_elastic else ""
        raise UsageError(
            f"DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) shares the set out, and "
            f"this is worker {worker} of {num_workers}{came}: give the loader shuffle=True instead, and prepare() "
            f"shares the set out{script_line()}"
        )


def _draws_from_torch(batches: object) -> bool:
    """Tell whether these are batches of a sampler of torch's own, which draws from torch's generator only."""
    own = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return type(batches) is BatchSampler and type(batches.sampler) in own


def _takes_all_once(sampler: object) -> bool:
    """Tell whether torch's own sampler gives every index once: not with replacement, nor another number of them."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _with_batches(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Copy a loader, which may be of a class of the script's own that changes what it gives, with other batches. Refuse
    such a one that has made an iterator already: it would go on with the batches of all."""
    held = {name: value for name, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter)}
    if held and type(loader) is not DataLoader:
        raise UsageError(
            f"{type(loader).__name__} has made its iterator before prepare() (.{next(iter(held))}), so its batches "
            "cannot be shared out among the workers: give prepare() a torch.utils.data.DataLoader, or use --data full"
            f"{script_line()}"
        )
    shared = copy.copy(loader)
    shared._iterator = None
    vars(shared)["batch_sampler"] = batches  # torch refuses to set it, and takes its indices from nothing else
    return shared


def note_epochs(
    loader: DataLoader[Any], clock: StepClock, on_pass: Callable[[], GradientSamples | None] | None = None,
    progress: Progress | None = None, has_weights: bool = False,
) -> DataLoader[Any]:  # fmt: skip
    """Tell the clock when an epoch starts and how long training waits for data, without changing what the loader gives:
    its class becomes a subclass of its own. `on_pass` is called when a pass of the training begins, and returns what is
    told of its batches; with `has_weights` also how many samples they have. With `progress`, a pass that was begun
    before a restart goes on where it was."""
    base = type(loader)

    def iterate(self: DataLoader[Any]) -> Any:
        clock.epoch()
        if on_pass is None or progress is None or not torch.is_grad_enabled():  # an evaluation
            return base.__iter__(self)
        samples = on_pass()
        began_s = perf_counter()
        next_pass = (lambda: _next_pass(self, base, progress)) if progress.goes_on_in_pass else None
        batches = _pass(self, base, progress)  # may start the processes that load
        clock.data_s += perf_counter() - began_s
        return _Counted(batches, samples, progress, clock, next_pass)

    members = {"__iter__": iterate, "__module__": base.__module__}
    if has_weights:
        members["_index_sampler"] = sized_indices(base)
    loader.__class__ = type(base.__name__, (base,), members)
    return loader


def _pass(loader: DataLoader[Any], base: type[DataLoader[Any]], progress: Progress) -> Any:
    """Return the loader's own iterator, of a new pass, or of a pass before a restart behind its taken batches."""
    shared = loader.batch_sampler
    resumed = progress.begin_pass(shared.epoch if isinstance(shared, Shared) else None)
    if resumed is not None and isinstance(shared, Shared):
        shared.epoch = resumed.passes
    can_skip = isinstance(shared, SharedBatches)
    if resumed is not None and isinstance(shared, SharedBatches):
        shared.skip = resumed.batch
    if resumed is None or not (resumed.start or resumed.batch):
        return base.__iter__(loader)
    now = progress.own.capture()
    progress.own.restore(resumed.start)  # what loader and sampler drew when this pass began, they draw again
    batches = base.__iter__(loader)
    indices = getattr(batches, "_sampler_iter", None) if loader.num_workers == 0 else None
    if isinstance(loader.dataset, IterableDataset):
        indices = None  # its own indices say nothing: the batches themselves are to be passed over
    sizes = sizes_of(batches)
    for _ in range(0 if can_skip else resumed.batch):
        if next(batches if indices is None else indices, None) is None:
            break
        if sizes is not None:
            sizes.take()
    progress.own.restore(now)
    return batches


def _next_pass(loader: DataLoader[Any], base: type[DataLoader[Any]], progress: Progress) -> Any:
    """Return the loader's own iterator of the pass after one that was taken to its end before a restart."""
    progress.pass_was_taken()
    shared = loader.batch_sampler if isinstance(loader.batch_sampler, SharedBatches) else None
    progress.begin_pass(shared.epoch if shared is not None else None)
    return base.__iter__(loader)


class _Counted:
    """A loader's own iterator that counts its batches, and their samples where they count. A pass that a restarted
    worker finds without a batch left is not handed out: `next_pass` is."""

    def __init__(
        self, batches: Any, samples: GradientSamples | None, progress: Progress, clock: StepClock,
        next_pass: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._samples = samples
        self._progress = progress
        self._next_pass = next_pass
        self._take(batches)

    def _take(self, batches: Any) -> None:
        self._batches = batches
        self._sizes = sizes_of(batches)
        try:
            self._count: int | None = len(batches)
        except TypeError:
            self._count = None  # an iterable dataset may not know
        self._progress.length = self._count

    def __iter__(self) -> "_Counted":
        return self

    def __next__(self) -> Any:
        progress, samples = self._progress, self._samples
        is_last = self._count is not None and progress.batch >= self._count
        if not (is_last and progress.is_by_epochs) or self._next_pass is not None:
            progress.boundary(BATCH)
        began_s = perf_counter()
        try:
            batch = self._next()
        except StopIteration:
            progress.took_all()
            if samples is not None:
                samples.end_pass()
            raise
        self._clock.data_s += perf_counter() - began_s
        progress.took_batch()
        if samples is not None:
            size = None if self._sizes is None else self._sizes.take()
            if torch.is_grad_enabled():
                samples.take(size, batch)
        return batch

    def _next(self) -> Any:
        next_pass, self._next_pass = self._next_pass, None
        try:
            return next(self._batches)
        except StopIteration:
            if next_pass is None:
                raise
            self._take(next_pass())
            return next(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Return how many samples a batch has, as far as the loader says; 0 if it does not."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return int(size or 0)
