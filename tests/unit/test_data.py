"""frameworks/torch/data: who takes which batches. Shares are disjoint, complete, the same for the same seed; one worker
sees exactly what it would see alone."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.frameworks.torch.data import EveryNth, SharedBatches, batch_size_of, note_epochs, share
from paceline.telemetry.steps import StepClock
from paceline.wire.messages import Position
from paceline.worker.positions.position import Progress


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def shares(loader_of: Any, workers: int, seed: int = 3, data: str = "shard") -> list[DataLoader[Any]]:
    return [share(loader_of(), w, workers, seed, data, lambda line: None) for w in range(workers)]


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


# --- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "batch_size", "workers"), [(60, 10, 2), (60, 10, 3), (61, 10, 2), (7, 3, 3), (5, 1, 4)]
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_cover_the_set_and_the_last_round_wraps(size: int, batch_size: int, workers: int, shuffle: bool) -> None:
    taken = [batches(x) for x in shares(lambda: DataLoader(Numbers(size), batch_size, shuffle=shuffle), workers)]
    rounds = {len(each) for each in taken}
    assert len(rounds) == 1, "everybody makes the same number of steps"
    in_order = [each[r] for r in range(rounds.pop()) for each in taken]
    whole = -(-size // batch_size)
    assert sorted(i for batch in in_order[:whole] for i in batch) == list(range(size))
    extra = in_order[whole:]
    assert extra == in_order[: len(extra)], "what is left over begins again at the front"
    assert len(extra) < workers
    if not shuffle:
        assert in_order[0] == list(range(batch_size))


def test_more_workers_than_batches() -> None:
    taken = [batches(x) for x in shares(lambda: DataLoader(Numbers(4), 4), 3)]
    assert taken == [[[0, 1, 2, 3]]] * 3


@pytest.mark.parametrize("size", [20, 23])
def test_drop_last(size: int) -> None:
    taken = [batches(x) for x in shares(lambda: DataLoader(Numbers(size), 5, drop_last=True), 2)]
    assert Counter(i for each in taken for batch in each for i in batch) == Counter(range(20))
    assert all(len(batch) == 5 for each in taken for batch in each)


def test_drop_last_of_less_than_a_batch_is_nothing() -> None:
    for each in shares(lambda: DataLoader(Numbers(3), 5, drop_last=True), 2):
        assert len(each) == 0
        assert batches(each) == []


def test_every_epoch_has_its_own_order_and_all_workers_the_same() -> None:
    first = shares(lambda: DataLoader(Numbers(40), 5, shuffle=True), 2)
    again = shares(lambda: DataLoader(Numbers(40), 5, shuffle=True), 2)
    orders = []
    for _ in range(3):
        taken = [batches(x) for x in first]
        assert taken == [batches(x) for x in again], "the same seed is the same order, whatever else was drawn"
        assert sorted(i for each in taken for batch in each for i in batch) == list(range(40))
        orders.append(taken)
        torch.rand(1)
    assert orders[0] != orders[1] != orders[2]
    other = shares(lambda: DataLoader(Numbers(40), 5, shuffle=True), 2, seed=4)
    assert [batches(x) for x in other] != orders[0]


def test_an_epoch_that_was_left_early_does_not_come_again() -> None:
    loaders = shares(lambda: DataLoader(Numbers(40), 5, shuffle=True), 2)
    next(iter(loaders[0]))
    batches(loaders[1])
    taken = [batches(x) for x in loaders]
    assert sorted(i for each in taken for batch in each for i in batch) == list(range(40))


def test_shuffling_draws_nothing_from_the_generator_of_the_script() -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    sampler = SharedBatches(20, 5, True, 0, 2, seed=9)
    list(sampler)
    assert torch.equal(torch.rand(3), want)


def test_the_length_is_known_without_iterating() -> None:
    for each in shares(lambda: DataLoader(Numbers(61), 10), 2):
        assert len(each) == 4
        assert len(batches(each)) == 4


# --- not shared out -------------------------------------------------------------------------------------------------


def test_one_worker_gets_its_loader_back() -> None:
    loader = DataLoader(Numbers(9), 2, shuffle=True)
    assert share(loader, 0, 1, 3, "shard", pytest.fail) is loader


def test_full_data_gives_every_worker_its_own_loader_back() -> None:
    loader = DataLoader(Numbers(9), 2, shuffle=True)
    assert share(loader, 1, 2, 3, "full", pytest.fail) is loader


def test_an_iterable_dataset_is_not_shared_out_and_that_is_said() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    said: list[str] = []
    loader: DataLoader[int] = DataLoader(Stream(), batch_size=2)
    assert share(loader, 1, 2, 3, "shard", said.append) is loader
    assert len(said) == 1
    assert "iterable" in said[0]


def test_a_loader_without_batches_is_not_shared_out_and_that_is_said() -> None:
    said: list[str] = []
    loader: DataLoader[int] = DataLoader(Numbers(6), batch_size=None)
    assert share(loader, 1, 2, 3, "shard", said.append) is loader
    assert len(said) == 1


# --- samplers of the user's own -------------------------------------------------------------------------------------


class Backwards(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


def test_a_sampler_of_ones_own_is_shared_out_batch_by_batch() -> None:
    said: list[str] = []
    loaders = [share(DataLoader(Numbers(7), 2, sampler=Backwards(7)), w, 2, 3, "shard", said.append) for w in range(2)]
    assert [batches(x) for x in loaders] == [[[6, 5], [2, 1]], [[4, 3], [0]]]
    assert len(said) == 2
    assert "the same order" in said[0]


def test_a_batch_sampler_of_ones_own() -> None:
    groups = [[0, 5], [1], [2, 3, 4]]
    loaders = shares(lambda: DataLoader(Numbers(6), batch_sampler=groups), 2)
    assert [batches(x) for x in loaders] == [[[0, 5], [2, 3, 4]], [[1], [0, 5]]]
    assert [len(x) for x in loaders] == [2, 2]


def test_a_batch_sampler_that_does_not_know_its_length() -> None:
    class Unknown:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0], [1], [2]])

    loaders = shares(lambda: DataLoader(Numbers(3), batch_sampler=Unknown()), 2)  # type: ignore[arg-type]
    assert [batches(x) for x in loaders] == [[[0], [2]], [[1], [0]]]


def test_fewer_batches_than_workers_for_a_sampler_of_ones_own() -> None:
    assert [list(EveryNth([[7]], w, 3)) for w in range(3)] == [[[7]]] * 3
    assert list(EveryNth([], 0, 2)) == []


@pytest.mark.parametrize("options", [{"replacement": True}, {"num_samples": 12}])
def test_a_random_sampler_with_wishes_of_its_own_keeps_them(options: dict[str, Any]) -> None:
    """With replacement, or of another length: that is no permutation of the set, and must not become one."""

    def loader() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(5)  # the same on all workers
        return DataLoader(Numbers(40), 3, sampler=RandomSampler(Numbers(40), generator=generator, **options))

    alone = batches(loader())
    taken = [batches(x) for x in shares(loader, 2)]
    assert [batch for pair in zip(*taken, strict=True) for batch in pair] == alone


def test_a_weighted_sampler_is_no_permutation_either() -> None:
    def loader() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Numbers(4), 2, sampler=WeightedRandomSampler([0.0, 1.0, 0.0, 1.0], 8, generator=generator))

    taken = [batches(x) for x in shares(loader, 2)]
    assert {i for each in taken for batch in each for i in batch} == {1, 3}


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler])
def test_a_sampler_over_something_else_than_the_set_keeps_its_length(sampler: Any) -> None:
    """SequentialSampler(range(4)) on a set of 10 means the first four."""
    loaders = shares(lambda: DataLoader(Numbers(10), 2, sampler=sampler(range(4))), 2)
    assert sorted(i for x in loaders for batch in batches(x) for i in batch) == [0, 1, 2, 3]


def test_a_plain_batch_sampler_given_by_hand_is_as_good_as_the_loaders_own() -> None:
    loaders = shares(lambda: DataLoader(Numbers(8), batch_sampler=BatchSampler(Backwards(8), 2, False)), 2)
    assert [batches(x) for x in loaders] == [[[7, 6], [3, 2]], [[5, 4], [1, 0]]]


# --- the rest of a loader -------------------------------------------------------------------------------------------


def as_sum(batch: list[Any]) -> Any:
    return sum(int(x[0]) for x in batch)


def seeded(worker: int) -> None:
    torch.manual_seed(worker)


def test_everything_else_of_the_loader_is_kept() -> None:
    data = TensorDataset(torch.arange(12))
    generator = torch.Generator()
    original = DataLoader(
        data,
        4,
        num_workers=2,
        collate_fn=as_sum,
        timeout=120,
        worker_init_fn=seeded,
        prefetch_factor=3,
        persistent_workers=True,
        generator=generator,
        in_order=False,
        multiprocessing_context="fork",
    )
    shared = share(original, 0, 2, 3, "shard", pytest.fail)
    kept = "dataset num_workers collate_fn timeout worker_init_fn prefetch_factor persistent_workers generator in_order"
    for name in kept.split():
        assert getattr(shared, name) == getattr(original, name), name
    assert shared.multiprocessing_context is original.multiprocessing_context


def test_a_shared_loader_collates_as_before() -> None:
    data = TensorDataset(torch.arange(12))
    loader = share(DataLoader(data, 4, collate_fn=as_sum), 1, 2, 3, "shard", pytest.fail)
    assert list(loader) == [4 + 5 + 6 + 7, 0 + 1 + 2 + 3]


def test_epochs_are_noted_without_changing_the_loader() -> None:
    noted: list[int] = []
    loader = DataLoader(Numbers(4), 2)
    clock = StepClock()
    clock.epoch = lambda: noted.append(1)  # type: ignore[method-assign]
    same = note_epochs(loader, clock)
    assert same is loader
    assert isinstance(loader, DataLoader)
    assert type(loader).__name__ == "DataLoader"
    assert batches(loader) == [[0, 1], [2, 3]]
    assert batches(loader) == [[0, 1], [2, 3]]
    assert len(noted) == 2
    assert len(loader) == 2


class Sizes:
    """Stands for what counts the samples in a gradient."""

    def __init__(self) -> None:
        self.taken: list[int | None] = []

    def take(self, size: int | None, batch: object) -> None:
        self.taken.append(size)

    def end_pass(self) -> None:
        self.taken.append(-1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_pass_that_goes_on_in_its_middle_gives_the_sizes_of_its_own_batches(
    num_workers: int, is_shared: bool
) -> None:
    counts = [3, 1, 4, 2, 5]
    if is_shared:
        loader = share(DataLoader(Numbers(11), 3, num_workers=num_workers), 0, 2, 3, "shard", pytest.fail)
    else:
        loader = DataLoader(Numbers(9), batch_sampler=[list(range(n)) for n in counts], num_workers=num_workers)
    want = [3] if is_shared else counts[2:]
    progress, sizes = Progress(0), Sizes()
    progress.resume(Position(0, 4, 0, 0, 1 if is_shared else 2, 2))
    loader = note_epochs(loader, StepClock(), lambda: sizes, progress, has_weights=True)  # type: ignore[arg-type,return-value]
    assert [len(batch) for batch in loader] == want
    assert sizes.taken == [*want, -1]
    assert len(loader) == (2 if is_shared else len(counts))


def test_the_batch_size_a_loader_tells() -> None:
    assert batch_size_of(DataLoader(Numbers(9), 3)) == 3
    assert batch_size_of(share(DataLoader(Numbers(9), 3), 0, 2, 1, "shard", pytest.fail)) == 3
    assert batch_size_of(DataLoader(Numbers(9), batch_sampler=BatchSampler(Backwards(9), 4, False))) == 4
    assert batch_size_of(DataLoader(Numbers(9), batch_sampler=[[0], [1, 2]])) == 0
    assert batch_size_of(DataLoader(Numbers(9), batch_size=None)) == 0


def test_what_a_sampler_draws_is_the_same_for_all_workers_and_not_taken_from_the_script() -> None:
    """A sampler that draws in the middle, too, from each of the global generators."""

    class Draws(Sampler[int]):
        def __len__(self) -> int:
            return 12

        def __iter__(self) -> Iterator[int]:
            left = torch.randperm(12).tolist()
            while left:
                yield left.pop((random.randrange(12) + numpy.random.randint(12)) % len(left))

    for sampler in (Draws, lambda: WeightedRandomSampler([1.0] * 12, 12, replacement=False)):
        loaders = shares(lambda sampler=sampler: DataLoader(Numbers(12), 2, sampler=sampler()), 3)
        orders = []
        for epoch in range(3):
            taken = []
            for number, each in enumerate(loaders):
                seed_all(number + 10 * epoch)
                wanted = torch.rand(1).item(), random.random(), numpy.random.rand()
                seed_all(number + 10 * epoch)
                taken.append(list(each.batch_sampler))
                assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == wanted
            assert sorted(i for each in taken for batch in each for i in batch) == list(range(12))
            orders.append(taken)
        assert orders[0] != orders[1] != orders[2]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class ByEpoch(RandomSampler):
    """A sampler that the script tells the epoch, as DistributedSampler and bucketing samplers are told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_script_finds_its_sampler_and_batch_size_on_a_shared_loader() -> None:
    loader = DataLoader(range(20), 3, sampler=ByEpoch(range(20)), drop_last=True)  # type: ignore[arg-type]
    shared = share(loader, 0, 2, 0, "shard", print)
    shared.sampler.set_epoch(4)  # type: ignore[attr-defined]
    assert shared.sampler is loader.sampler and loader.sampler.epoch == 4  # type: ignore[attr-defined]
    assert (shared.batch_size, shared.drop_last) == (3, True)
    assert len(shared) == len(list(shared)) == 3


def test_a_script_finds_what_its_batch_sampler_has_on_a_shared_loader() -> None:
    class Batches(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    batches = Batches(range(20), 3, drop_last=False)
    shared = share(DataLoader(range(20), batch_sampler=batches), 1, 2, 0, "shard", print)  # type: ignore[arg-type]
    shared.batch_sampler.set_epoch(4)  # type: ignore[union-attr]
    assert batches.epoch == 4
    with pytest.raises(AttributeError, match="set_step"):
        shared.batch_sampler.set_step(4)  # type: ignore[union-attr]
