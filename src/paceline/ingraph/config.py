"""HOW may a session or a server use devices? `ConfigProto` with the options that TensorFlow's programs set.

Made by the user's script, read by Server and Session; frameworks/torch/devices makes it true. What the script says
holds instead of the flags of the command line; what it does not say (None) is as they say. Their defaults differ from
TensorFlow's in two: soft placement and memory growth are on, because a program for four GPUs should run here.
"""

from dataclasses import dataclass, field, fields
from numbers import Real
from types import UnionType
from typing import Self

import msgspec

from paceline.cluster.pinning import GpuUse
from paceline.cluster.spelling import hint
from paceline.errors import UsageError


class _Options:
    """A mistyped option is refused, not kept, and so is a value of another kind."""

    def __new__(cls, *values: object, **options: object) -> Self:
        for name in options:
            cls._check_known(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        self._check_known(name)
        super().__setattr__(name, _checked(name, value, type(self).__annotations__[name]))

    @classmethod
    def _check_known(cls, name: str) -> None:
        known = list(cls.__annotations__)
        if name not in known:
            raise UsageError(f"{cls.__name__} has no option {name!r}; {hint(name, known)}.")


def _checked(name: str, value: object, kind: object) -> object:
    """The value, if it is of that kind; 0 and 1 are TensorFlow's too for False and True."""
    if value is None and isinstance(kind, UnionType):
        return None
    if kind == bool | None:
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        wanted = "True or False"
    elif kind is GPUOptions:
        if isinstance(value, GPUOptions):
            return value
        wanted = "a GPUOptions"
    else:
        if isinstance(value, Real) and not isinstance(value, bool):
            return value
        wanted = "a number"
    raise UsageError(f"{name} is {value!r}; it must be {wanted}.")


@dataclass
class GPUOptions(_Options):
    """A process's use of GPU memory.

    >>> GPUOptions(allow_growth=False, per_process_gpu_memory_fraction=0.3)
    GPUOptions(allow_growth=False, per_process_gpu_memory_fraction=0.3)
    """

    allow_growth: bool | None = None
    per_process_gpu_memory_fraction: float | None = None  # or 0, TensorFlow's way to say nothing


@dataclass
class ConfigProto(_Options):
    """What a session or a server may do with devices; attributes may be set afterwards, as in TensorFlow.

    >>> config = ConfigProto(log_device_placement=True)
    >>> config.gpu_options.allow_growth = False
    >>> print(config)
    gpu_options {
      allow_growth: false
    }
    log_device_placement: true
    """

    gpu_options: GPUOptions = field(default_factory=GPUOptions)
    allow_soft_placement: bool | None = None
    log_device_placement: bool | None = None
    operation_timeout_in_ms: int = 0  # of a session's step, and for its tasks to come; 0: as long as it takes

    def gpu_use(self, flags: GpuUse) -> GpuUse:
        """The flags, and in their place what this says; a fraction that is none is refused.

        >>> use = ConfigProto(allow_soft_placement=True).gpu_use(GpuUse(is_soft=False, memory_fraction=0.3))
        >>> use.is_soft, use.memory_fraction
        (True, 0.3)
        """
        fraction = self.gpu_options.per_process_gpu_memory_fraction or 0.0
        if not 0 <= fraction <= 1:
            raise UsageError(
                f"per_process_gpu_memory_fraction is {fraction}; it must be above 0 and at most 1, such as 0.3."
            )
        said = {
            "is_soft": self.allow_soft_placement,
            "allow_growth": self.gpu_options.allow_growth,
            "memory_fraction": fraction or None,
            "is_logged": self.log_device_placement,
        }
        return msgspec.structs.replace(flags, **{name: value for name, value in said.items() if value is not None})

    def __str__(self) -> str:
        return "\n".join(_text(self, ConfigProto()))


def _text(value: object, plain: object, indent: str = "") -> list[str]:
    """What was said, in protobuf's text form."""
    lines = []
    for each in fields(value):  # type: ignore[arg-type]
        mine, its = getattr(value, each.name), getattr(plain, each.name)
        if mine == its:
            continue
        if isinstance(mine, GPUOptions):
            lines += [f"{indent}{each.name} {{", *_text(mine, its, indent + "  "), f"{indent}}}"]
        else:
            lines.append(f"{indent}{each.name}: {str(mine).lower() if isinstance(mine, bool) else mine}")
    return lines
