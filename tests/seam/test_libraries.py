"""Training loops of real libraries, with the model and optimizer prepared before the library gets them: equal bits.

They need `pip install 'paceline[seam]'` and run in `make test-full`; where they are not installed they are skipped.
With two workers they are not compared: the libraries keep state of their own in the process, which threads share.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, check, run_cluster, weights
from table import small
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from paceline.errors import PacelineError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 40


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Inputs and labels under the names that transformers asks for."""

    def __init__(self) -> None:
        self._x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(3))

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


# --- accelerate -----------------------------------------------------------------------------------------------------


def accelerated(job: Job, is_prepared_first: bool = True) -> Returned:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = job.make(WithLoss)
    optimizer: Any = AdamW(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, 3, 0.5)
    loader: Any = DataLoader(Numbers(), batch_size=4, shuffle=True)
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
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    return {"model": weights(model), "losses": losses}


def test_accelerate(tmp_path: Path) -> None:
    check(accelerated, tmp_path, 1, lane="shm")


def test_an_optimizer_that_accelerate_has_wrapped_is_refused() -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(PacelineError, match="AcceleratedOptimizer"):
        run_cluster(lambda job: accelerated(job, is_prepared_first=False), 1)


# --- transformers ---------------------------------------------------------------------------------------------------


def test_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def recipe(job: Job) -> Returned:
        import accelerate

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        model = job.make(WithLoss)
        optimizer = AdamW(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, optimizer)
        scheduler = StepLR(optimizer, 4, 0.5)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / ("plain" if job.ctx is None else "cluster")),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=11,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Numbers(), optimizers=(optimizer, scheduler))
        told = trainer.train()
        return {"model": weights(model), "loss": told.training_loss}

    check(recipe, tmp_path / "run", 1, lane="shm")


# --- lightning ------------------------------------------------------------------------------------------------------


def test_lightning_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = small()
            self.optimizer: Any = None
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = (self.net(batch["x"]) - batch["labels"]).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return {"optimizer": self.optimizer, "lr_scheduler": StepLR(self.optimizer, 1, 0.5)}

    def recipe(job: Job) -> Returned:
        model = job.make(Module)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        model.optimizer = optimizer
        torch.manual_seed(5)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
        )
        trainer.fit(model, loader)
        return {"model": weights(model), "losses": model.losses}

    check(recipe, tmp_path / "run", 1, lane="shm")
