"""WHERE is the digit? Document 003's (spatial) transformer: it learns to move cluttered digits before it reads them.

    paceline demo transformer                                          1 ps + 2 workers
    python spatial_transformer.py                                      one plain process
    python spatial_transformer.py --job_name=worker --task_index=1     by hand, as the document does; see settings.py

Look at transformed.png in the run folder: digits as they are, and below as its classifier gets them. (Spatial
transformer networks, Jaderberg 2015: no attention in it.)
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist
from paceline.datasets.cluttered import cluttered
from paceline.datasets.picture import save_rows
from paceline.models.spatial_transformer import SpatialTransformer

FOR_INIT = ("--job_name", "--task_index", "--ps_hosts", "--worker_hosts", "--mode", "--run_dir")
SHOWN = 12
TESTED = 1_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a spatial transformer on cluttered digits.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=10_000, help="to train on")
    parser.add_argument("--batch-size", type=int, default=100, help="of each worker")
    parser.add_argument("--larger", action="store_true", help="the document's bigger network: three convolutions")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1234, help="of the cluttered digits")
    parser.add_argument("--data-dir", help="a folder with MNIST; the embedded set when left out")
    for flag in FOR_INIT:
        parser.add_argument(flag, help=argparse.SUPPRESS)  # paceline.init reads them itself
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    digits = mnist.load(args.data_dir)
    train_x, train_y = map(torch.from_numpy, cluttered(digits.train_x, digits.train_y, args.images, args.seed))
    test_x, test_y = map(torch.from_numpy, cluttered(digits.test_x, digits.test_y, TESTED, args.seed + 1))
    test_x, test_y = test_x.to(ctx.device), test_y.to(ctx.device)

    model = SpatialTransformer(larger=args.larger).to(ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = model(test_x).argmax(1) == test_y
        model.train()
        return float(right.float().mean())

    for epoch in ctx.epochs(args.epochs):
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number % 10 == 0:
                ctx.log({"loss": loss.item()})
        print(f"Accuracy ({epoch}): {accuracy():.4f}", flush=True)

    ctx.pull()  # the newest parameters: other workers may have gone on since this one's last step
    ctx.log({"test_accuracy": accuracy()})
    if ctx.is_chief:
        model.eval()
        with torch.no_grad():
            before, after = test_x[:SHOWN].cpu(), model.transform(test_x[:SHOWN]).cpu()
        path = save_rows((ctx.run_dir or Path.cwd()) / "transformed.png", [before.numpy(), after.numpy()], zoom=3)
        print(f"Picture: {path}", flush=True)


if __name__ == "__main__":
    main()
