"""HOW is a cluster compared with plain PyTorch? One recipe runs in both, and what it returns must agree bit for bit.

Used by the tests in this folder. A recipe is a training loop that gets a `Job`; it never knows where it runs.
The plain run of n workers is n plain processes' work in lockstep: before every `optimizer.step()` their gradients
become (g0 + g1 + …) / n in worker order, then torch's own optimizer does the rest.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import paceline

LOCK = threading.Lock()
Returned = Mapping[str, Any]


class Job:
    """What a recipe gets: its `prepare`, its place, and numbers that no other thread can disturb."""

    def __init__(self, index: int, num_workers: int, ctx: Any = None, together: "Together | None" = None) -> None:
        self.index = index
        self.num_workers = num_workers
        self.ctx = ctx
        self.rng = torch.Generator().manual_seed(1000 + index)
        self._together = together
        self.plain_steps = 0

    @staticmethod
    def make(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
        """A model from the global generator, which all threads share: one at a time."""
        with LOCK:
            torch.manual_seed(seed)
            return build()

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(dtype)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        if self.ctx is not None:
            return self.ctx.prepare(*objects, **options)
        for each in objects:
            if isinstance(each, torch.optim.Optimizer):
                each.register_step_post_hook(self._count)
                if self._together is not None:
                    self._together.average(each, self.index)
        if self._together is not None:
            self._together.barrier.wait()  # nobody draws numbers while another still makes its model
        return objects[0] if len(objects) == 1 else objects

    def _count(self, *_: Any) -> None:
        self.plain_steps += 1


Recipe = Callable[[Job], Returned]


class Together:
    """n plain trainings in lockstep, whose gradients are averaged in worker order before each step."""

    def __init__(self, num_workers: int) -> None:
        self.barrier = threading.Barrier(num_workers, timeout=60)
        self._given: list[list[torch.Tensor | None]] = [[] for _ in range(num_workers)]

    def average(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        def average_now() -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._given[index] = [p.grad for p in parameters]
            self.barrier.wait()
            means = [mean(list(parts)) for parts in zip(*self._given, strict=True)]
            self.barrier.wait()
            for parameter, gradient in zip(parameters, means, strict=True):
                parameter.grad = gradient

        def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
            if closure is None:
                average_now()
                return None

            def averaging() -> Any:
                loss = closure()
                average_now()
                return loss

            return (args[0],), {"closure": averaging}

        optimizer.register_step_pre_hook(before_step)


def mean(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """(g0 + g1 + …) / n with a true division; None where nobody has a gradient."""
    present = [p for p in parts if p is not None]
    if not present:
        return None
    total = present[0].clone()
    for part in present[1:]:
        total += part
    return total / len(parts) if len(parts) > 1 else total


def run_plain(recipe: Recipe, workers: int = 1) -> tuple[list[Returned], int]:
    """What each worker returned, and how many steps there were."""
    together = Together(workers) if workers > 1 else None
    jobs = [Job(i, workers, together=together) for i in range(workers)]
    if together is None:
        return [recipe(jobs[0])], jobs[0].plain_steps
    returned: list[Returned] = [{} for _ in jobs]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        torch.set_num_threads(1)  # a thread's own, like its caller's
        try:
            returned[index] = recipe(jobs[index])
        except BaseException as error:
            errors.append(error)
            together.barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return returned, jobs[0].plain_steps


def run_cluster(recipe: Recipe, workers: int = 1, **options: Any) -> tuple[list[Returned], dict[str, Any]]:
    """What each worker returned, and the summary."""
    returned: list[Returned] = [{} for _ in range(workers)]

    def work(ctx: Any) -> None:
        torch.set_num_threads(1)
        returned[ctx.worker_index] = recipe(Job(ctx.worker_index, ctx.num_workers, ctx))

    summary = paceline.launch(work, workers=workers, **options)
    return returned, summary


def check(recipe: Recipe, run_dir: Path, workers: int = 1, mode: str = "async", **options: Any) -> dict[str, Any]:
    """Both runs return the same bits, every step was an update of the ps, and the checkpoint holds the same model."""
    plain, steps = run_plain(recipe, workers)
    ours, summary = run_cluster(recipe, workers, mode=mode, run_dir=str(run_dir), **options)
    for index, (want, got) in enumerate(zip(plain, ours, strict=True)):
        assert_same(want, got, f"worker {index}")
    assert summary["ok"]
    assert summary["global_step"] == steps > 0, "the ps never heard of these steps"
    saved = load_file(next((run_dir / "checkpoints").glob("step-*")) / "model.safetensors")
    for name, value in saved.items() if "model" in plain[0] else ():
        assert_same(plain[0]["model"][name.removeprefix("_orig_mod.")], value, f"checkpoint {name}")
    return summary


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def assert_same(want: Any, got: Any, where: str) -> None:
    """Equal in type, structure and every bit."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), where
        assert (want.dtype, want.shape) == (got.dtype, got.shape), where
        if bits(want) != bits(got):
            apart = (want.double() - got.double()).abs().max().item()
            raise AssertionError(f"{where}: not the same bits, up to {apart:.3g} apart\n{want}\n{got}")
    elif isinstance(want, Mapping):
        assert want.keys() == got.keys(), where
        for key in want:
            assert_same(want[key], got[key], f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(want) == len(got), where
        for number, (a, b) in enumerate(zip(want, got, strict=True)):
            assert_same(a, b, f"{where}[{number}]")
    else:
        assert (type(want), want) == (type(got), got), where


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of everything a model would save."""
    return {name: value.clone() for name, value in model.state_dict().items()}
