"""WHAT does an autoencoder keep of a digit? Document 003's: 784-200-784, softplus, trained to draw its own input.

    paceline demo autoencoder                                       1 ps + 2 workers
    python autoencoder.py                                           one plain process
    python autoencoder.py --job_name=worker --task_index=1          by hand, as the document does; see settings.py

Look at reconstructions.png in the run folder: digits that it never saw, and below what it makes of them.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist
from paceline.datasets.picture import save_rows
from paceline.datasets.scaling import Scaler
from paceline.models.autoencoder import Autoencoder, reconstruction_cost

FOR_INIT = ("--job_name", "--task_index", "--ps_hosts", "--worker_hosts", "--mode", "--run_dir")
SHOWN = 12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an autoencoder on MNIST.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=60_000, help="to train on")
    parser.add_argument("--batch-size", type=int, default=128, help="of each worker")
    parser.add_argument("--hidden", type=int, default=200, help="numbers that are left of a digit")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of what disturbs the input in training")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--data-dir", help="a folder with MNIST; the embedded set when left out")
    for flag in FOR_INIT:
        parser.add_argument(flag, help=argparse.SUPPRESS)  # paceline.init reads them itself
    return parser.parse_args()


def picture(model: nn.Module, scaler: Scaler, images: torch.Tensor, noise: float, path: Path) -> Path:
    """Digits; with noise, what the network got of them; and what it drew."""
    given = images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(images.device)
    with torch.no_grad():
        drawn = model(given)
    rows = [images, given, drawn] if noise else [images, drawn]
    return save_rows(path, [scaler.as_pixels(row.cpu().numpy()).reshape(-1, 28, 28) for row in rows], zoom=3)


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    digits = mnist.load(args.data_dir)
    scaler = Scaler.measured(digits.train_x)
    train = torch.from_numpy(scaler.standardised(digits.train_x[: args.images]))
    test = torch.from_numpy(scaler.standardised(digits.test_x)).to(ctx.device)

    model = Autoencoder(hidden=args.hidden, noise=args.noise).to(ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(TensorDataset(train), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)

    for epoch in ctx.epochs(args.epochs):
        total = seen = 0.0
        for (batch,) in loader:
            images = batch.to(ctx.device)
            optimizer.zero_grad()
            cost = reconstruction_cost(model(images), images)
            cost.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total, seen = total + cost.item(), seen + len(images)
            ctx.log({"cost": total / seen})  # of an image
        print(f"Epoch: {epoch + 1:04d} cost= {total / seen:.9f}", flush=True)

    ctx.pull()  # the newest parameters: other workers may have gone on since this one's last step
    model.eval()
    with torch.no_grad():
        ctx.log({"test_cost": reconstruction_cost(model(test), test).item() / len(test)})
    if ctx.is_chief:
        path = (ctx.run_dir or Path.cwd()) / "reconstructions.png"
        print(f"Picture: {picture(model, scaler, test[:SHOWN], args.noise, path)}", flush=True)


if __name__ == "__main__":
    main()
