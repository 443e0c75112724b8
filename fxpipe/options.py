"""Options: the options of ``fxpipe.compile``. ``Options`` declares each option with its default, and checks its value.

A new option is a field of ``Options`` and a parameter of ``compile``, which type checkers read; a test compares both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, cast

from fxpipe.errors import RunError
from fxpipe.hardware import Hardware
from fxpipe.packed import BatchDim, Offsets, Packed, check_counted, is_batch_dim
from fxpipe.policies import CHECKS, LEVEL, Checks, TracerName, Tracing, Zero, ZeroLevel
from fxpipe.precision import Precision
from fxpipe.validation import (
    Expected,
    check,
    is_flag,
    is_list,
    is_mapping,
    is_text,
    is_whole,
    list_of,
    one_or_each,
)

AUTO = "auto"
Recompute = bool | Sequence[str] | Literal["auto"]


@dataclass(frozen=True, eq=False)
class Options:
    """The options of ``compile``, whose docstring explains each option.

    Options of type ``Any`` belong to higher packages (a schedule, boundaries, passes, weights), which look names up.

    Raises:
        RunError: a value is out of its range, or conflicts with another option.
    """

    loss_fn: Callable[..., Any] | None = None
    boundaries: Any = ()
    microbatches: int | None = None
    batch_dim: BatchDim = 0
    schedule: Any = "1f1b"
    placement: Mapping[str, int | Sequence[int] | Literal["all"]] | None = None
    tracer: TracerName | Tracing = "auto"
    example_args: Sequence[Any] | None = None
    example_kwargs: Mapping[str, Any] | None = None
    zero: ZeroLevel | Zero = 0
    precision: Precision | None = None
    loss_weight: Callable[..., Any] | None = None
    recompute: Recompute = False
    offload: Recompute = False
    hardware: Hardware | str | None = None
    init_fn: Callable[..., Any] | None = None
    checkpoint: Any = None
    parallelize: Callable[..., None] | None = None
    stage_compiler: Callable[..., Any] | None = None
    checks: Checks = CHECKS
    passes: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        # A default needs no check; None is the default of many options.
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not field.default:
                check(RunError, _KINDS, **{field.name: value})
        check_counted(self.batch_dim)
        for option, does in (("recompute", "recomputes"), ("offload", "offloads")):
            if not isinstance(names := getattr(self, option), str):
                object.__setattr__(self, option, bool(names) if is_flag(names) else tuple(cast(Sequence[str], names)))
            if self.device.memory is None and names == AUTO:
                raise RunError(
                    f'{option}="auto" {does} as little as fits the memory of hardware=, which is not given; write '
                    f'hardware="h100", hardware=fxpipe.Hardware(memory=40e9), in bytes, or {option}=True'
                )
        self._check_both()
        if self.parallelize is not None:
            self._check_parallelize()

    @classmethod
    def of(cls, parameters: Mapping[str, Any], **more: Any) -> Options:
        """Returns the options among a function's parameters: the ``locals()`` of the function's first line."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in parameters.items() if name in names}, **more)

    @cached_property
    def sharding(self) -> Zero:
        """``zero`` as a policy."""
        return self.zero if isinstance(self.zero, Zero) else Zero(self.zero)

    @cached_property
    def tracing(self) -> Tracing:
        """``tracer`` as a policy."""
        return self.tracer if isinstance(self.tracer, Tracing) else Tracing(self.tracer)

    @cached_property
    def device(self) -> Hardware:
        """``hardware`` as figures. A plan may not exceed ``device.memory``, unless it is None."""
        return Hardware.of(self.hardware)

    @property
    def has_example(self) -> bool:
        return self.example_args is not None or self.example_kwargs is not None

    def for_calls(self) -> Options:
        """The options that calls need after ``compile``; the others may hold memory that the user wants to free."""
        return replace(self, example_args=None, example_kwargs=None, init_fn=None, checkpoint=None)

    def microbatches_on(self, ranks: int) -> int:
        """The number of micro-batches per batch: the option's, or 4 per pipe rank, or 1 for a single rank."""
        return self.microbatches or (4 * ranks if ranks > 1 else 1)

    @property
    def facts(self) -> dict[str, str]:
        """Option → description of its value, for options that must be equal on all ranks. Functions are compared by
        name and line, without their closures; ranks compare the resulting programs later."""
        names = [field.name for field in fields(self) if field.name not in _OF_ONE_RANK]
        return {name: describe_value(getattr(self, name)) for name in names}

    def _check_both(self) -> None:
        """RunError if recompute= and offload= mark the same stages."""
        again, host = self.recompute, self.offload
        if again is True and host is True:
            raise RunError(
                "recompute=True and offload=True both take all stages; name the stages of one of them, or write "
                '"auto" for both'
            )
        both = sorted(set(again) & set(host)) if isinstance(again, tuple) and isinstance(host, tuple) else ()
        if both:
            raise RunError(f"stage {both[0]!r} is in recompute= and in offload=; leave out one of them")

    def _check_parallelize(self) -> None:
        if self.sharding.level == 3:
            raise RunError(
                "zero=3 and parallelize= both decide how parameters lie over the data axis; write zero=2 or leave it "
                'out, and write fully_shard(module, mesh=mesh["data"]) in parallelize'
            )
        if self.precision is not None:
            raise RunError(
                "precision= and parallelize= both decide the types of parameters; leave out precision=, and write "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(...)) in parallelize, or call under torch.autocast"
            )
        if self.tracing.name not in ("auto", "record"):  # these tracers keep modules
            raise RunError(
                f'tracer="{self.tracing.name}" takes modules apart, and parallelize= needs them whole; write '
                'tracer="record"'
            )
        if self.stage_compiler is not None:
            raise RunError(
                "stage_compiler= and parallelize= both replace what a stage runs; call module.compile() on the parts "
                "of the stage in parallelize"
            )


_OF_ONE_RANK = {"example_args", "example_kwargs", "checkpoint"}
"""Options that may differ between ranks: a rank has its own data, and a path on its own disk."""


_KINDS: Mapping[str, Expected] = {
    "loss_fn": Expected(callable, "a function (output, target) -> loss"),
    "microbatches": Expected(lambda value: is_whole(value) and value > 0, "a whole number of at least 1"),
    "batch_dim": Expected(
        is_batch_dim, "a dimension, or a dict input -> dimension, None, fxpipe.Packed(...) or fxpipe.Offsets()"
    ),
    "placement": Expected(
        lambda value: is_mapping(value) and all(v == "all" or one_or_each(is_whole)(v) for v in value.values()),
        'a dict stage name -> pipe rank, or several, (0, 1, 2), or "all"',
    ),
    "tracer": Expected(
        lambda value: is_text(value) or isinstance(value, Tracing),
        "a name out of fxpipe.TRACERS, or fxpipe.Tracing(...)",
    ),
    "example_args": Expected(is_list, "the inputs as a tuple, (x,) where there is one"),
    "example_kwargs": Expected(
        lambda value: is_mapping(value) and all(map(is_text, value)), "a dict input name -> value"
    ),
    "zero": Expected(lambda value: isinstance(value, Zero) or LEVEL.fits(value), f"{LEVEL.words}, or fxpipe.Zero(...)"),
    "precision": Expected(
        lambda value: isinstance(value, Precision), "fxpipe.Precision(...), as fxpipe.Precision(compute=torch.bfloat16)"
    ),
    "loss_weight": Expected(callable, "a function of a micro-batch's inputs"),
    "recompute": Expected(
        lambda value: is_flag(value) or value == AUTO or (not is_text(value) and list_of(is_text)(value)),
        'True, False, "auto" or a list of stage names',
    ),
    "offload": Expected(
        lambda value: is_flag(value) or value == AUTO or (not is_text(value) and list_of(is_text)(value)),
        'True, False, "auto" or a list of stage names',
    ),
    "hardware": Expected(
        lambda value: isinstance(value, Hardware) or is_text(value),
        'the name of a GPU, such as "h100", or fxpipe.Hardware(...), as fxpipe.Hardware(memory=80e9)',
    ),
    "init_fn": Expected(callable, "a function (module) -> None"),
    "parallelize": Expected(callable, "a function (stage_module, mesh) -> None"),
    "stage_compiler": Expected(callable, "a function such as torch.compile"),
    "checks": Expected(lambda value: isinstance(value, Checks), "fxpipe.Checks(...), as fxpipe.Checks(timeout=600)"),
    "passes": Expected(
        lambda value: list_of(callable)(value) and len(value) > 0, "a list of functions Program -> Program"
    ),
}
"""Option → a test of its value, and a description of valid values. Other options are checked by their own packages."""


_PLAIN = (str, int, float, type(None), Precision, Hardware, Zero, Tracing, Checks)


def describe_value(value: Any) -> str:
    """A text for a value, without addresses; for a function, its name and first line: closures may differ by rank."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{describe_value(key)}: {describe_value(val)}' for key, val in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Packed | Offsets):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        return f"{type(value).__name__} {describe_value(values)}"
    # The repr of other values differs between processes: describes functions by name, other objects by class.
    while isinstance(value, functools.partial):
        value = value.func
    if not callable(value):
        return f"a {type(value).__name__}"
    name = getattr(value, "__qualname__", type(value).__qualname__).rpartition("<locals>.")[2]
    code = getattr(value, "__code__", None)
    return name if code is None else f"{name} of line {code.co_firstlineno}"
