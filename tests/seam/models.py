"""Cases of models: buffers, dtypes, compiled, copied, checkpointed activations, parts that are called alone."""

import copy
import warnings

import torch
from alike import LOCK, Job, Returned, weights
from safetensors.torch import load, save
from table import STEPS, Different, NotCompared, Refused, case, loss_of, small, train, trained
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

TOPIC = "Models and buffers"
THREADS = NotCompared()
ONE_GENERATOR = "Two workers of this comparison are threads, and torch's global generator is one for all threads."


@case(
    TOPIC, "BatchNorm", two=Different(),
    note="Each worker has statistics of its own, as in plain PyTorch, and goes on with them; `model.safetensors` holds "
    "their mean (`--buffers chief`: the chief's), `workers.safetensors` each worker's.",
)  # fmt: skip
def batch_norm(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    losses = train(job, model, optimizer)
    model.eval()
    losses.append(loss_of(job, model).detach())
    return {"model": weights(model), "losses": losses}


@case(TOPIC, "channels_last")
def channels_last(job: Job) -> Returned:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(64, 2))
        return net.to(memory_format=torch.channels_last)

    model = job.make(build)
    before = model[0].weight.stride()
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        images = job.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        model(images).square().mean().backward()
        optimizer.step()
    assert model[0].weight.stride() == before != (27, 9, 3, 1)
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@case(TOPIC, "bfloat16", master="model")
def bfloat16(job: Job) -> Returned:
    model = job.make(lambda: small().to(torch.bfloat16))
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(job.randn(5, 7, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


class Mixed(nn.Module):
    """Four dtypes, not in the order of their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.single = nn.Linear(5, 5)
        self.long = nn.Linear(5, 5, dtype=torch.float64)
        self.half_float = nn.Linear(5, 3, dtype=torch.float16)
        self.last = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.short(x.to(torch.bfloat16))
        x = self.long(self.single(x.float()).double())
        return self.last(self.half_float(x.half()).to(torch.bfloat16)).float()


@case(TOPIC, "mixed dtypes", master="model")
def mixed_dtypes(job: Job) -> Returned:
    model = job.make(Mixed)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(job, model, optimizer)
    return {"model": weights(model)}


@case(TOPIC, "deepcopy")
def copied(job: Job) -> Returned:
    """A deepcopy is a model of its own: it trains, moves and evaluates without a word to the ps."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    twins = []
    for number, _ in enumerate(trained(job, model, optimizer)):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin(torch.ones(1, 7))
        if number == 4:
            apart = copy.deepcopy(model)
            own = SGD(apart.parameters(), lr=10.0)
            apart(torch.ones(1, 7)).sum().backward()
            own.step()
            twins.append(weights(apart))
        twins.append(weights(twin))
    return {"model": weights(model), "twins": twins}


@case(TOPIC, "BatchNorm with --buffers chief", buffers="chief")
def batch_norm_of_the_chief(job: Job) -> Returned:
    return batch_norm(job)


@case(TOPIC, "a buffer that is assigned anew in forward()", buffers="chief")
def buffer_assigned(job: Job) -> Returned:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 3)
            self.register_buffer("center", torch.zeros(3))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.center = self.center * 0.9 + y.mean(0).detach() * 0.1
            self.seen = self.seen + len(x)
            return y - self.center

    model = job.make(Centered)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(TOPIC, "a buffer that is not saved (persistent=False)")
def unsaved_buffer(job: Job) -> Returned:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 3)
            self.register_buffer("count", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.linear(x) / self.count

    model = job.make(Counting)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model), "count": model.count.clone()}


@case(TOPIC, "spectral_norm, which keeps vectors in buffers", buffers="chief")
def spectral(job: Job) -> Returned:
    def build() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(7, 9)), nn.Tanh(), nn.Linear(9, 3))

    model = job.make(build)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(TOPIC, "dropout", two=THREADS, note=ONE_GENERATOR)
def dropout(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5), nn.Linear(9, 3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    torch.manual_seed(4)
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(TOPIC, "activation checkpointing", two=THREADS, note=ONE_GENERATOR)
def checkpointed(job: Job) -> Returned:
    model = job.make(
        lambda: nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 3))
    )
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    torch.manual_seed(4)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = job.randn(5, 7)
        if step % 2:
            y = checkpoint_sequential(model, 2, x, use_reentrant=False)
        else:
            y = checkpoint(model, x, use_reentrant=False)
        y.square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "torch.compile of the prepared model (backend aot_eager)")
def compiled(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    with LOCK:  # torch's compiler is one for all threads
        fast = torch.compile(model, backend="aot_eager")
        loss_of(job, fast).backward()
        optimizer.zero_grad()
    return {"losses": train(job, fast, optimizer), "model": weights(model)}


@case(TOPIC, "torch.jit.trace of the model for evaluation")
def traced(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(), LOCK:
        warnings.simplefilter("ignore")  # torch announces the end of torch.jit
        fast = torch.jit.trace(model, torch.ones(1, 7))
    seen = []
    for _ in trained(job, model, optimizer):
        with torch.no_grad():
            seen.append(fast(torch.ones(1, 7)))
    return {"model": weights(model), "seen": seen}


@case(TOPIC, "state_dict written to a file and read into another model between steps")
def written_and_read(job: Job) -> Returned:
    model, other = job.make(small), job.make(small, seed=7)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    seen = []
    for _ in trained(job, model, optimizer):
        other.load_state_dict(load(save(model.state_dict())))
        with torch.no_grad():
            seen.append(other(torch.ones(1, 7)))
    return {"model": weights(model), "seen": seen}


@case(TOPIC, "forward hooks, before and after prepare()")
def forward_hooks(job: Job) -> Returned:
    model = job.make(small)
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().mean()))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    model[2].register_full_backward_hook(lambda module, before, after: seen.append(after[0].mean()))
    return {"losses": train(job, model, optimizer), "model": weights(model), "seen": seen}


@case(TOPIC, "torch.func.functional_call with the parameters taken once")
def functional(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    taken = dict(model.named_parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.func.functional_call(model, taken, (job.randn(5, 7),)).square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


@case(
    TOPIC, "a model in half precision", one=Different(), two=Different(),
    note="The ps keeps parameters and optimizer memory in float32 and rounds what workers get. `--master model` does "
    "as plain PyTorch does (the two rows above).",
)  # fmt: skip
def half_precision(job: Job) -> Returned:
    model = job.make(lambda: small().to(torch.bfloat16))
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(job.randn(5, 7, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


@case(
    "Models and buffers", "a layer that is added after prepare() and trained", one=Refused("made after"),
    two=Refused("made after"), note="Make all layers before `prepare()`; one that shall wait is frozen until then.",
)  # fmt: skip
def added_layer(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    train(job, model, optimizer, 2)
    model.append(job.make(lambda: nn.Linear(3, 2)))
    train(job, model, optimizer, 2)
    return {"model": weights(model)}
