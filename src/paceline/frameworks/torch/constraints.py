"""Remember which PyTorch parameters have a constraint (paceline.constrain), and keep it where no ps does.

Used by frameworks/torch/layout, which makes it a part of the layout, and, where the script's own optimizer steps (no
cluster, mode local), by frameworks/torch/preparation and frameworks/torch/local; by ingraph, which refuses what it
cannot keep.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.errors import UsageError
from paceline.params.constraint import Constraint
from paceline.worker.constraints import check
from paceline.worker.script import script_line

_constraints: Any = WeakTensorKeyDictionary()  # not on the parameters: what is saved with them must load anywhere
_prepared: Any = WeakTensorKeyDictionary()


def mark(parameters: Sequence[Any], constraint: Constraint) -> None:
    """Note the constraint of all these parameters, or of none."""
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            raise UsageError(f"constrain() takes parameters, not a {type(parameter).__name__}{script_line()}")
        what, dtype = f"a parameter of shape {list(parameter.shape)}", str(parameter.dtype)
        check(what, constraint, dtype, parameter.dim(), constraint_of(parameter), parameter in _prepared)
    for parameter in parameters:
        _constraints[parameter] = constraint


def constraint_of(tensor: torch.Tensor) -> Constraint | None:
    """Return the constraint of a parameter, if it has one."""
    found: Constraint | None = _constraints.get(tensor)
    return found


def bind(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
    """Close the parameters to further constraints. Refuse one that would hold nothing, because this optimizer does not
    train the parameter."""
    trained = _parameters(optimizer)
    known = {id(parameter) for parameter in trained}
    for name, parameter in model.named_parameters() if model is not None else ():
        if id(parameter) not in known and parameter in _constraints:
            raise UsageError(
                f"{name} has a constraint ({_constraints[parameter]}), and the optimizer does not train it: give it to "
                "the optimizer, or constrain other parameters"
            )
    for each in trained:
        _prepared[each] = True


def refuse_unkept(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Refuse a constraint that nothing keeps, because this optimizer was not prepared."""
    for parameter in _parameters(optimizer):
        if parameter in _constraints and parameter not in _prepared:
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} has a constraint ({_constraints[parameter]}), which "
                f"{who} does not keep: call ctx.prepare(model, optimizer) before that (without a cluster, too), or "
                f"leave the constraint out{script_line()}"
            )


def hold_after_steps(optimizer: torch.optim.Optimizer) -> None:
    """Have the constraints hold after each step of the optimizer's own, before other hooks see the parameters."""
    held = [(p, constraint_of(p)) for p in _parameters(optimizer)]
    constrained = [(p, constraint) for p, constraint in held if constraint is not None]

    @torch.no_grad()
    def hold(*_: Any) -> None:
        for parameter, constraint in constrained:
            constraint.hold(parameter)

    if constrained:
        handle = optimizer.register_step_post_hook(hold)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]
