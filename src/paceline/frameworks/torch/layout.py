"""Describe a PyTorch model and its optimizer to a ps: the layout, and the optimizer's name and numbers.

Used by frameworks/torch/training_step and frameworks/torch/preparation. Numbers travel, code never does.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import UsageError
from paceline.frameworks.torch.carried import statistics_of
from paceline.frameworks.torch.constraints import constraint_of
from paceline.params.layout import ITEM_BYTES, Layout, TensorSpec, widest_first
from paceline.views import NAMES
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.script import script_line

SUPPORTED = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


NOT_ON_PS = {
    "capturable": "is for CUDA graphs, and the ps runs the optimizer on a CPU",
    "differentiable": "is for backward passes through the step, and the ps makes the step",
}


def optimizer_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the name and the numbers of an optimizer, as a ps takes them."""
    if type(optimizer) not in SUPPORTED:
        names = ", ".join(cls.__name__ for cls in SUPPORTED)
        raise UsageError(
            f"{type(optimizer).__name__} cannot run on a ps, because it is not known to be elementwise: use one of "
            f"{names} (`--mode local` takes any optimizer: there it runs on the worker)"
        )
    check_options(optimizer)
    return OptimizerSpec(type(optimizer).__name__, group_options(optimizer))


def check_options(optimizer: torch.optim.Optimizer) -> None:
    """Refuse options with which a ps cannot make a step."""
    for name, why in NOT_ON_PS.items():
        if any(group.get(name) for group in optimizer.param_groups):
            raise UsageError(
                f"{type(optimizer).__name__} has {name}=True, which {why}: leave it out{script_line()}. "
                "`--mode local`, where the optimizer runs on the worker, takes it"
            )


def group_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of each parameter group now, without what schedulers keep there for themselves."""
    names = optimizer.defaults
    return [{n: plain(v) for n, v in group.items() if n in names} for group in optimizer.param_groups]


def plain(value: Any) -> Any:
    """Convert an option as it travels: torch's and numpy's numbers become Python's."""
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of the model holds, by name. Tied tensors have one name, the first; parameters that only
    the optimizer has are called by their number."""
    saved = model.state_dict(keep_vars=True)
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)]
    groups = optimizer.param_groups if optimizer is not None else []
    named += [(f"optimizer.{number}", p) for number, p in enumerate(p for group in groups for p in group["params"])]
    first: dict[int, str] = {}
    return {name: tensor for name, tensor in named if first.setdefault(id(tensor), name) == name}


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Return the layout of a model, and its tensors by the layout's names."""
    _check_initialised(model)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    tensors = named_tensors(model, optimizer)
    buffers: dict[int, Literal["plain", "statistic"]] = {id(b): "plain" for b in model.buffers()}
    buffers |= dict.fromkeys(statistics_of(model), "statistic")
    specs = [_spec(n, t, group_of.get(id(t), -1), buffers.get(id(t), "")) for n, t in tensors.items()]
    if not {id(p) for p in model.parameters()} & group_of.keys():
        raise UsageError("the optimizer holds none of this model's parameters, so training would not change the model")
    return widest_first(specs), tensors


def _check_initialised(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(is_lazy(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise UsageError(
                f"{name or 'the model'} is a {type(module).__name__} that has seen no batch yet, so its parameters "
                "have no shape: run one batch through the model before prepare() (and before the optimizer is made)"
            )


def _spec(name: str, tensor: torch.Tensor, group: int, buffer: Literal["", "plain", "statistic"]) -> TensorSpec:
    if tensor.is_meta:
        raise UsageError(f"{name} is on the device meta and has no values yet: fill it before prepare()")
    if tensor.dtype not in NAMES:
        raise UsageError(f"{name} has dtype {tensor.dtype}, which cannot be sent: use one of {', '.join(ITEM_BYTES)}")
    stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
    shape, dtype = tuple(tensor.shape), NAMES[tensor.dtype]
    if group < 0:
        return TensorSpec(name, shape, tuple(stride), dtype, buffer=buffer)
    return TensorSpec(name, shape, tuple(stride), dtype, group, constraint_of(tensor))


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True
