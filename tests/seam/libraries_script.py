"""Scripts with training loops of real libraries; run by test_libraries.py as `python` and as `paceline run`.

    libraries_script.py NAME FOLDER [INDEX SOCKET]

Writes what worker INDEX saw to FOLDER. With SOCKET it is one of two plain processes that average their gradients before
each step, through that socket. What a library keeps is the process's own, so each program is a process.
"""

import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from alike import weights
from safetensors.torch import load, save, save_file
from table import small
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import paceline

ROWS = 40
Seen = dict[str, torch.Tensor]


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Inputs and labels under the names that transformers asks for; each worker has numbers of its own."""

    def __init__(self, index: int) -> None:
        self._x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(3 + index))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[index], "labels": self._x[index, :3]}


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Job:
    """What a program gets: its context, its place and its folder."""

    def __init__(self, ctx: Any, index: int, folder: Path, other: "Other | None") -> None:
        self.ctx = ctx
        self.index = index
        self.folder = folder
        self._other = other
        self.is_alone = other is None and ctx.num_workers == 1

    def prepare(self, *objects: Any) -> Any:
        """Prepare as every script does; without a cluster that changes nothing. Two plain processes average."""
        prepared = self.ctx.prepare(*objects)
        for each in objects:
            if isinstance(each, Optimizer) and self._other is not None:
                each.register_step_pre_hook(self._other.average)
        return prepared

    def numbers(self) -> Numbers:
        return Numbers(self.index)

    def loader(self) -> Any:
        """Several workers, each with its own numbers, take them in order: what shuffles them is one permutation."""
        return DataLoader(self.numbers(), batch_size=4, shuffle=self.is_alone)


class Other:
    """The other one of two plain processes."""

    def __init__(self, index: int, number: int) -> None:
        self._index = index
        self._socket = socket.socket(fileno=number)
        self._socket.settimeout(120.0)
        self._file = self._socket.makefile("rb")

    def average(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make each gradient the mean of both, in the order of the workers; after the closure, if there is one."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._average(optimizer)
            return None

        def averaging() -> Any:
            loss = closure()
            self._average(optimizer)
            return loss

        return (args[0],), {"closure": averaging}

    def _average(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = {str(n): p.grad for n, p in enumerate(parameters) if p.grad is not None}
        sent = save(own)
        self._socket.sendall(struct.pack("<q", len(sent)) + sent)
        (size,) = struct.unpack("<q", self._file.read(8))
        pair = [own, load(self._file.read(size))]
        first, second = pair if self._index == 0 else pair[::-1]
        for number, parameter in enumerate(parameters):
            given = [each[str(number)] for each in (first, second) if str(number) in each]
            if given:
                parameter.grad = (given[0] + given[1] if len(given) > 1 else given[0].clone()) / 2


def seen(model: nn.Module, losses: list[torch.Tensor], **more: torch.Tensor) -> Seen:
    return {**{f"model.{n}": v for n, v in weights(model).items()}, "losses": torch.stack(losses), **more}


# --- accelerate -----------------------------------------------------------------------------------------------------


def accelerated(job: Job, is_prepared_first: bool = True, **options: Any) -> Seen:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model: Any = WithLoss()
    optimizer: Any = AdamW(model.parameters(), lr=0.01)
    scheduler: Any = StepLR(optimizer, 3, 0.5)
    loader: Any = job.loader()
    if is_prepared_first:
        model, optimizer, scheduler, loader = job.prepare(model, optimizer, scheduler, loader)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
    torch.manual_seed(5)
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.detach().float())
    return seen(accelerator.unwrap_model(model), losses)


def accelerate_state(job: Job) -> Seen:
    """save_state() in the middle, some steps, load_state(): rolled back."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model: Any = WithLoss()
    optimizer: Any = AdamW(model.parameters(), lr=0.01)
    model, optimizer = job.prepare(model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step, batch in enumerate(job.loader()):
        if step == 4:
            accelerator.save_state(str(job.folder / f"state-{job.index}"))
        if step == 7:
            accelerator.load_state(str(job.folder / f"state-{job.index}"))
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return seen(accelerator.unwrap_model(model), losses)


# --- transformers ---------------------------------------------------------------------------------------------------


def trainer(job: Job, is_own: bool = False, **options: Any) -> Seen:
    """`is_own`: a Trainer that prepares in create_optimizer() what it has made itself."""
    import transformers

    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, *args: Any, **options: Any) -> Any:
            made = super().create_optimizer(*args, **options)
            self.model, self.optimizer = job.prepare(self.model, made)
            return self.optimizer

    model: Any = WithLoss()
    optimizers: Any = (None, None)
    if not is_own:
        model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.01))
        optimizers = (optimizer, StepLR(optimizer, 4, 0.5))
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(job.folder / f"trainer-{job.index}"),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 11,
            **options,
        }
    )
    made = (Own if is_own else transformers.Trainer)(
        model, arguments, train_dataset=job.numbers(), eval_dataset=job.numbers(), optimizers=optimizers
    )
    told = made.train()
    logged = [torch.tensor(line["loss"]) for line in made.state.log_history if "loss" in line]
    return seen(model, logged, mean=torch.tensor(told.training_loss))


def trainer_with_checkpoints(job: Job) -> Seen:
    return trainer(job, save_strategy="steps", save_steps=3, save_total_limit=1, eval_strategy="steps", eval_steps=3)


def trainer_with_the_best(job: Job) -> Seen:
    """A rate so large that the first model is the best; it is loaded at the end."""
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    return trainer(job, True, learning_rate=2.0, load_best_model_at_end=True, **saves)


# --- lightning ------------------------------------------------------------------------------------------------------


def lightning_trainer(job: Job, prepared_in: str = "script", is_manual: bool = False, **options: Any) -> Seen:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = small()
            self.losses: list[torch.Tensor] = []
            self.automatic_optimization = not is_manual

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
            loss = (self.net(batch["x"]) - batch["labels"]).square().mean()
            self.losses.append(loss.detach().float())
            if is_manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return None
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.log("val", (self.net(batch["x"]) - batch["labels"]).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = made
            if optimizer is None:
                optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
                _, optimizer = job.prepare(self, optimizer)
            return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}

    model: Any = Module()
    made: Any = None
    loader: Any = job.loader()
    if prepared_in == "script":
        model, made = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    torch.manual_seed(5)
    fitted = lightning.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(job.folder),
            **({} if is_manual else {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
            **options,
        }
    )
    fitted.fit(model, loader, loader)
    return seen(model, model.losses)


def lightning_with_checkpoints(job: Job) -> Seen:
    from lightning.pytorch import callbacks

    own = str(job.folder / f"lightning-{job.index}")
    saved = callbacks.ModelCheckpoint(own, monitor="val", save_top_k=2, save_last=True, every_n_epochs=1)
    stop = callbacks.EarlyStopping("val", patience=1, min_delta=100.0)
    return lightning_trainer(job, enable_checkpointing=True, callbacks=[saved, stop], max_epochs=4)


def lightning_with_averages(job: Job) -> Seen:
    from lightning.pytorch import callbacks

    swa = callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    return lightning_trainer(job, callbacks=[swa], max_epochs=3, accumulate_grad_batches=1)


def fabric(job: Job, is_prepared_first: bool = True) -> Seen:
    import lightning

    made = lightning.Fabric(accelerator="cpu", devices=1)
    model: Any = small()
    optimizer: Any = AdamW(model.parameters(), lr=0.01)
    if is_prepared_first:
        model, optimizer = job.prepare(model, optimizer)
        model, optimizer = made.setup(model, optimizer)
    else:
        model, optimizer = made.setup(model, optimizer)
        model, optimizer = job.prepare(model, optimizer)
    loader = made.setup_dataloaders(job.loader())
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["labels"]).square().mean()
        made.backward(loss)
        made.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        losses.append(loss.detach())
    return seen(model.module if is_prepared_first else model, losses)


PROGRAMS: dict[str, Callable[[Job], Seen]] = {
    "accelerate": accelerated,
    "accelerate_bf16": lambda job: accelerated(job, mixed_precision="bf16"),
    "accelerate_state": accelerate_state,
    "accelerate_first": lambda job: accelerated(job, is_prepared_first=False),
    "trainer": trainer,
    "trainer_own": lambda job: trainer(job, is_own=True),
    "trainer_checkpoints": trainer_with_checkpoints,
    "trainer_best": trainer_with_the_best,
    "lightning": lightning_trainer,
    "lightning_configure": lambda job: lightning_trainer(job, prepared_in="configure_optimizers"),
    "lightning_manual": lambda job: lightning_trainer(job, is_manual=True),
    "lightning_bf16": lambda job: lightning_trainer(job, precision="bf16-mixed"),
    "lightning_checkpoints": lightning_with_checkpoints,
    "lightning_averages": lightning_with_averages,
    "fabric": fabric,
    "fabric_first": lambda job: fabric(job, is_prepared_first=False),
}


def main(name: str, folder: str, index: str = "", number: str = "") -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ctx = paceline.init()
    own = int(index) if index else ctx.worker_index
    other = Other(own, int(number)) if number else None
    told = PROGRAMS[name](Job(ctx, own, Path(folder), other))
    save_file({key: value.contiguous() for key, value in told.items()}, Path(folder) / f"{name}-{own}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
