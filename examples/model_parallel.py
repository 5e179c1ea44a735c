"""Model parallelism in its plain form (documents 001 and 002): one model, two parts, two tasks.

    python model_parallel.py                                     both parts in this process
    paceline run --workers 3 model_parallel.py                   worker:0 trains, the parts are on worker:1 and worker:2

Both print the same loss to the last digit: `paceline.place` changes where a part computes, not what. Everything else is
an ordinary loop.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--devices", help="of the two parts, such as /gpu:0,/gpu:1")
    return parser.parse_args()


def find_devices(args: argparse.Namespace) -> list[str]:
    """Where the two parts shall be; a worker that has one serves in join() until the end."""
    if args.devices:
        return args.devices.split(",")
    ctx = paceline.init()
    if ctx.num_workers == 1:
        return ["/cpu:0", "/cpu:0"]
    server = paceline.Server()
    if server.task.index > 0:
        server.join()
        raise SystemExit
    others = server.cluster.task_indices("worker")[1:]
    return [f"/job:worker/task:{others[part % len(others)]}" for part in range(2)]


def main() -> None:
    torch.set_num_threads(1)  # as many in every task: another number adds in another order
    args = arguments()
    devices = find_devices(args)
    torch.manual_seed(1)
    lower = nn.Sequential(nn.Linear(784, args.hidden), nn.Sigmoid())
    upper = nn.Sequential(nn.Dropout(0.1), nn.Linear(args.hidden, 10))
    model = nn.Sequential(paceline.place(lower, devices[0]), paceline.place(upper, devices[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    digits = mnist.load()
    train = TensorDataset(torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y))
    batches = iter(DataLoader(train, batch_size=100, shuffle=True))
    for step in range(args.steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}: loss {loss.item()!r}", flush=True)

    model.eval()
    with torch.no_grad():
        right = model(torch.from_numpy(digits.test_x)).argmax(1) == torch.from_numpy(digits.test_y)
    print(f"Test accuracy {right.float().mean().item():.4f}; parts on {devices[0]} and {devices[1]}", flush=True)


if __name__ == "__main__":
    main()
