"""ON WHICH hardware of this task does an op run? Its tensors are moved there, and what it makes is made there.

Called by ingraph/neighbours for a local scope, by calls for one that came from afar and by parts for a node.
A device that says nothing about hardware changes nothing. Must never choose another task.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.cluster.devices import Device
from paceline.frameworks.torch.devices import torch_device
from paceline.ingraph import values


def run_on(device: Device, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function on a device of this process.

    >>> run_on(Device.parse("/cpu:0"), max, (1, 2), {})
    2
    """
    torch.get_num_threads()  # asked for it, torch lets this thread, too, compute on as many cores as the user has said
    if device.kind is None:
        return fn(*args, **kwargs)
    where = torch_device(device.hardware)
    args = [values.mapped(each, lambda leaf: _moved(leaf, where)) for each in args]
    kwargs = {name: values.mapped(each, lambda leaf: _moved(leaf, where)) for name, each in kwargs.items()}
    if where.type == "cpu":
        return fn(*args, **kwargs)
    with where:
        return fn(*args, **kwargs)


def _moved(leaf: Any, where: torch.device) -> Any:
    return leaf.to(where) if isinstance(leaf, torch.Tensor) else leaf
