"""HOW is a model built on another task, when no code travels? torch.nn's plain layers by name, with their numbers.

Used by ingraph/mirror (describe, may_draw) and ingraph/copies (build). What is not in the catalogue, or was changed by
hand, is refused with the sentence that names the other way: an op that makes the model there. A new layer = one line in
LAYERS, and in _DRAWING if it draws random numbers.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.errors import ProtocolError, UsageError

SEQUENTIAL = "Sequential"
_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias")
_NORM = ("num_features", "eps", "momentum", "affine", "track_running_stats")
_MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode")
_AVERAGE_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_EMBEDDING = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")

LAYERS: dict[str, tuple[str, ...]] = {  # of torch.nn: the arguments of the class, each of which is an attribute too
    "AdaptiveAvgPool1d": ("output_size",),
    "AdaptiveAvgPool2d": ("output_size",),
    "AdaptiveMaxPool2d": ("output_size", "return_indices"),
    "AvgPool1d": _AVERAGE_POOL,
    "AvgPool2d": (*_AVERAGE_POOL, "divisor_override"),
    "BatchNorm1d": _NORM,
    "BatchNorm2d": _NORM,
    "BatchNorm3d": _NORM,
    "Conv1d": (*_CONVOLUTION, "padding_mode"),
    "Conv2d": (*_CONVOLUTION, "padding_mode"),
    "Conv3d": (*_CONVOLUTION, "padding_mode"),
    "ConvTranspose2d": (*_CONVOLUTION, "output_padding", "padding_mode"),
    "Dropout": ("p", "inplace"),
    "Dropout2d": ("p", "inplace"),
    "ELU": ("alpha", "inplace"),
    "Embedding": _EMBEDDING,
    "Flatten": ("start_dim", "end_dim"),
    "GELU": ("approximate",),
    "GRU": _RECURRENT,
    "GroupNorm": ("num_groups", "num_channels", "eps", "affine"),
    "Identity": (),
    "LSTM": (*_RECURRENT, "proj_size"),
    "LayerNorm": ("normalized_shape", "eps", "elementwise_affine", "bias"),
    "LeakyReLU": ("negative_slope", "inplace"),
    "Linear": ("in_features", "out_features", "bias"),
    "LocalResponseNorm": ("size", "alpha", "beta", "k"),
    "LogSoftmax": ("dim",),
    "MaxPool1d": _MAX_POOL,
    "MaxPool2d": _MAX_POOL,
    "PReLU": ("num_parameters",),
    "ReLU": ("inplace",),
    "SiLU": ("inplace",),
    "Sigmoid": (),
    "Softmax": ("dim",),
    "Softplus": ("beta", "threshold"),
    "Tanh": (),
    "Unflatten": ("dim", "unflattened_size"),
    "ZeroPad2d": ("padding",),
}
_DRAWING = (nn.Dropout, nn.Dropout2d)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """One layer; `children` of a Sequential are (name, number of an earlier layer), so that one may stand twice."""

    kind: str
    arguments: dict[str, Any] = {}
    children: list[tuple[str, int]] = []


def describe(module: nn.Module) -> list[Layer]:
    """The layers of a module, each after its children; UsageError if it cannot be told in words.

    >>> [layer.kind for layer in describe(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))]
    ['Linear', 'ReLU', 'Sequential']
    """
    told: list[Layer] = []
    _describe(module, "", told, {})
    _refuse_ties(module)
    return told


def _describe(module: nn.Module, name: str, told: list[Layer], numbers: dict[nn.Module, int]) -> int:
    if module in numbers:
        return numbers[module]
    kind = type(module).__name__
    if (where := getattr(vars(module).get("forward"), "where", None)) is not None:
        raise refusal(f"its part {name!r} ({kind}) is itself placed on {where}")
    if not _is_plain(module):
        raise refusal(f"{type(module).__module__}.{type(module).__qualname__} is no plain layer of torch.nn")
    if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in vars(module):
        raise refusal(f"this {kind} has hooks, or a forward of its own")
    if kind == SEQUENTIAL:
        named = [(each, child) for each, child in module._modules.items() if child]
        children = [(each, _describe(child, f"{name}.{each}".lstrip("."), told, numbers)) for each, child in named]
        layer = Layer(kind, {}, children)
    else:
        layer = Layer(kind, {name: _argument(module, name) for name in LAYERS[kind]})
    told.append(layer)
    return numbers.setdefault(module, len(told) - 1)


def _argument(module: nn.Module, name: str) -> Any:
    value = getattr(module, name)
    if name == "bias" and not isinstance(value, bool):
        return value is not None
    if isinstance(value, torch.Tensor):
        raise refusal(f"the {name} of this {type(module).__name__} is a tensor")
    return list(value) if isinstance(value, tuple | torch.Size) else value


def _refuse_ties(module: nn.Module) -> None:
    """One tensor under two names: a layer that stands twice has that by itself, two layers by hand."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values()]:
            if tensor is not None and owners.setdefault(id(tensor), id(part)) != id(part):
                raise refusal("two layers share a tensor")


def build(told: Sequence[Layer]) -> nn.Module:
    """The module that was described, with values of its own.

    >>> build(describe(nn.Sequential(nn.Conv2d(3, 8, 5, padding="same"), nn.Softplus())))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(5, 5), stride=(1, 1), padding=same)
      (1): Softplus(beta=1.0, threshold=20.0)
    )
    """
    made: list[nn.Module] = []
    for layer in told:
        if layer.kind == SEQUENTIAL:
            if any(not 0 <= number < len(made) for _, number in layer.children):
                raise ProtocolError("a layer that is described after the one that holds it")
            made.append(nn.Sequential(OrderedDict((name, made[number]) for name, number in layer.children)))
        elif layer.kind in LAYERS and layer.arguments.keys() == set(LAYERS[layer.kind]):
            arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in layer.arguments.items()}
            made.append(getattr(nn, layer.kind)(**arguments))
        else:
            raise ProtocolError(f"no layer {layer.kind!r} with {', '.join(layer.arguments) or 'no arguments'}")
    if not made:
        raise ProtocolError("a module of no layers")
    return made[-1]


def may_draw(module: nn.Module) -> bool:
    """Whether a forward pass of this module may draw random numbers now; of a class that is not ours nobody knows.

    >>> may_draw(nn.Linear(2, 2)), may_draw(nn.Dropout()), may_draw(nn.Dropout().eval()), may_draw(nn.Bilinear(2, 2, 2))
    (False, True, False, True)
    """
    return any(each.training and _may_draw(each) for each in module.modules())


def _may_draw(layer: nn.Module) -> bool:
    if isinstance(layer, nn.RNNBase):
        return layer.dropout > 0
    return isinstance(layer, _DRAWING) or not _is_plain(layer)


def _is_plain(layer: nn.Module) -> bool:
    kind = type(layer).__name__
    return getattr(nn, kind, None) is type(layer) and kind in (SEQUENTIAL, *LAYERS)


def refusal(why: str) -> UsageError:
    """Why a module cannot be told in words, and what to do."""
    return UsageError(
        f"Another task cannot build this module by itself: {why}, and no code travels. Give build=make_it, a "
        "@paceline.op (or functools.partial of one) that both sides import and that returns such a module."
    )
