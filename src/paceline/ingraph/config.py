"""HOW may a session or a server use devices? `ConfigProto` with the options that TensorFlow's programs set.

Made by the user's script, read by Server and Session; worker/torch_devices makes it true. Two defaults differ from
TensorFlow's: soft placement and memory growth are on, because a program that was written for four GPUs should run here.
"""

from dataclasses import dataclass, field, fields

from paceline.cluster.pinning import GpuUse
from paceline.cluster.spelling import hint
from paceline.errors import UsageError


class _Options:
    """A mistyped option is refused, not kept."""

    def __setattr__(self, name: str, value: object) -> None:
        known = list(type(self).__annotations__)
        if name not in known:
            raise UsageError(f"{type(self).__name__} has no option {name!r}; {hint(name, known)}.")
        super().__setattr__(name, value)


@dataclass
class GPUOptions(_Options):
    """A process's use of GPU memory.

    >>> GPUOptions(allow_growth=False, per_process_gpu_memory_fraction=0.3)
    GPUOptions(allow_growth=False, per_process_gpu_memory_fraction=0.3)
    """

    allow_growth: bool = True
    per_process_gpu_memory_fraction: float = 0.0  # 0: nothing was said


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
    allow_soft_placement: bool = True
    log_device_placement: bool = False

    def gpu_use(self) -> GpuUse:
        """The same in our own words; a fraction that is none is refused.

        >>> ConfigProto(gpu_options=GPUOptions(per_process_gpu_memory_fraction=0.3)).gpu_use().memory_fraction
        0.3
        """
        fraction = self.gpu_options.per_process_gpu_memory_fraction
        if not 0 <= fraction <= 1:
            raise UsageError(
                f"per_process_gpu_memory_fraction is {fraction}; it must be above 0 and at most 1, such as 0.3."
            )
        return GpuUse(
            is_soft=self.allow_soft_placement,
            allow_growth=self.gpu_options.allow_growth,
            memory_fraction=fraction or None,
            is_logged=self.log_device_placement,
        )

    def __str__(self) -> str:
        return "\n".join(_text(self, ConfigProto()))


def _text(value: object, plain: object, indent: str = "") -> list[str]:
    """What differs from the defaults, in protobuf's text form."""
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
