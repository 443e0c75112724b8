"""Options: the options of ``fxpipe.compile`` and ``fxpipe.preview``.

``Options`` declares each option once, with its type and its default, and checks its value. ``taking`` gives a function
these options as its parameters. A new option is a field of ``Options`` and an entry of ``compile``'s docstring.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar, cast

from torch import nn

from fxpipe.errors import DoesNotFit, RunError, nearest
from fxpipe.graph.program import LAYERS, Program
from fxpipe.hardware import Hardware
from fxpipe.packed import BatchDim, Offsets, Packed, check_counted, is_batch_dim
from fxpipe.parameters.weights import Weights
from fxpipe.policies import CHECKS, LEVEL, Checks, TracerName, Tracing, Zero, ZeroLevel
from fxpipe.precision import Precision
from fxpipe.schedules import Family, ScheduleName, named, with_costs
from fxpipe.schedules.families.limits import InFlight
from fxpipe.schedules.schedule import Schedule
from fxpipe.trace.cuts.cuts_by_name import Boundaries
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

P = ParamSpec("P")
Arguments = TypeVar("Arguments")
Result = TypeVar("Result")
AUTO = "auto"
Offload = bool | Sequence[str] | Literal["auto"]
Recompute = Offload | Literal["layers"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """The options of ``compile`` and ``preview``, which ``compile``'s docstring explains.

    Raises:
        RunError: a value is out of its range, or conflicts with another option.
    """

    loss_fn: Callable[..., Any] | None = None
    boundaries: Boundaries = ()
    microbatches: int | None = None
    example_args: Sequence[Any] | None = None
    example_kwargs: Mapping[str, Any] | None = None
    batch_dim: BatchDim = 0
    loss_weight: Callable[..., Any] | None = None
    schedule: ScheduleName | Family | Schedule = "1f1b"
    in_flight: InFlight | None = None
    microbatch_cost: Callable[..., Any] | None = None
    placement: Mapping[str, int | Sequence[int] | Literal["all"]] | None = None
    recompute: Recompute = False
    offload: Offload = False
    hardware: Hardware | str | None = None
    zero: ZeroLevel | Zero = 0
    precision: Precision | None = None
    checkpoint: str | os.PathLike[str] | Weights | None = None
    init_fn: Callable[[nn.Module], None] | None = None
    parallelize: Callable[..., None] | None = None
    tracer: TracerName | Tracing = "auto"
    checks: Checks = CHECKS
    stage_compiler: Callable[..., Any] | None = None
    passes: Sequence[Callable[[Program], Program]] | None = None
    shows_nearest: ClassVar[bool] = False
    """Whether the nearest plan replaces an error if no plan fits the memory."""

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
        object.__setattr__(self, "schedule", _schedule_of(self.schedule))
        if self.in_flight is not None or self.microbatch_cost is not None:
            family = self._family()
            if self.in_flight is not None:
                object.__setattr__(self, "schedule", with_costs(family, in_flight=self.in_flight))
        if self.parallelize is not None:
            self._check_parallelize()

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

    def within_memory(self, plan: Callable[[float | None], Result]) -> Result:
        """The result of ``plan`` for the memory of a rank, or for the least bytes of its error if nothing fits and
        ``shows_nearest``."""
        try:
            return plan(self.device.memory)
        except DoesNotFit as error:
            if not self.shows_nearest:
                raise
            return plan(error.least_bytes)

    @property
    def layers(self) -> str | tuple[str, ...]:
        """The layers that ``recompute`` may ask to checkpoint, for ``Program.recompute``: names may be stages', too.
        With "auto" these are all layers, and a search decides later, stage by stage."""
        if self.recompute == AUTO:
            return LAYERS if self.parallelize is None and self.stage_compiler is None else ()
        is_of_layers = self.recompute == LAYERS or isinstance(self.recompute, tuple)
        return cast("str | tuple[str, ...]", self.recompute) if is_of_layers else ()

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
        names = [field.name for field in fields(Options) if field.name not in _OF_ONE_RANK]
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
            raise RunError(IN_BOTH.format(both[0]))

    def _family(self) -> ScheduleName | Family:
        """``schedule`` as a family; RunError if it is a table, for options that families alone follow."""
        if isinstance(self.schedule, Schedule):
            option = "in_flight" if self.in_flight is not None else "microbatch_cost"
            raise RunError(
                f"{option}= is for the tables of families, and schedule= is a table, whose cells say what runs when; "
                f'leave {option}= out, or name a family, as schedule="1f1b"'
            )
        return self.schedule

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


def _schedule_of(given: Any) -> Any:
    """A schedule under its name in ``SCHEDULES``, or the table of a file."""
    if isinstance(given, str) and given.lower().endswith(".csv"):
        return Schedule.from_csv(given)
    return named(given)


def taking(arguments: Callable[P, Arguments]) -> Callable[[Callable[[Arguments], Result]], Callable[P, Result]]:
    """Makes a function of one value, of the class ``arguments``, a function of the fields of this class.

    Type checkers read the parameters from the class. ``inspect.signature`` and ``help`` show them with their defaults.

    >>> @dataclass(frozen=True)
    ... class Arguments:
    ...     zero: int = 0
    >>> @taking(Arguments)
    ... def compile(given: Arguments) -> int:
    ...     return given.zero
    >>> compile(zero=1), str(inspect.signature(compile))
    (1, "(zero: 'int' = 0) -> 'int'")

    Raises:
        TypeError: an argument is missing or has an unknown name. For an option of fxpipe 0.2, it says what to write.
    """
    signature = inspect.signature(arguments)

    def decorate(function: Callable[[Arguments], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> Result:
            for name in filter(RENAMED.__contains__, options):
                raise TypeError(f"{name}= is an option of fxpipe 0.2; write {RENAMED[name]}")
            try:
                signature.bind(*args, **options)
            except TypeError as error:
                unknown = next((name for name in options if name not in signature.parameters), None)
                known = "" if unknown is None else nearest(unknown, signature.parameters)
                raise TypeError(f"{function.__name__}() {error}{known}") from None
            return function(arguments(*args, **options))

        result = function.__annotations__["return"]
        call.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        return call

    return decorate


RENAMED: Mapping[str, str] = {
    "zero_scope": 'zero=fxpipe.Zero(1, scope="data")',
    "bucket_cap_mb": "zero=fxpipe.Zero(1, bucket_mb=25)",
    "auto_opaque": 'tracer=fxpipe.Tracing("auto", opaque=False)',
    "check_capture": 'tracer=fxpipe.Tracing("auto", check=False)',
    "check_batches": "checks=fxpipe.Checks(batches=False)",
    "error_if_nonfinite": 'checks=fxpipe.Checks(nonfinite="raise")',
    "timeout": "checks=fxpipe.Checks(timeout=300)",
    "memory_per_rank": "hardware=fxpipe.Hardware(memory=80e9)",
}
"""The options of fxpipe 0.2 that are parts of other options now → what to write."""


IN_BOTH = "stage {!r} is in recompute= and in offload=; leave out one of them"
_OF_ONE_RANK = {"example_args", "example_kwargs", "checkpoint"}
"""Options that may differ between ranks: a rank has its own data, and a path on its own disk."""


_KINDS: Mapping[str, Expected] = {
    "loss_fn": Expected(
        lambda value: callable(value) and not isinstance(value, type),
        "a function (output, target) -> loss, as nn.CrossEntropyLoss() is",
    ),
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
    "microbatch_cost": Expected(callable, "a function of a micro-batch's inputs"),
    "costs": Expected(
        lambda value: list_of(is_list)(value) and len(value) > 0 and all(map(len, value)),
        "for each batch a list with the cost of each sample",
    ),
    "recompute": Expected(
        lambda value: value == LAYERS or _marks(value),
        'True, False, "auto", "layers" or a list of names or patterns, of stages or of layers',
    ),
    "offload": Expected(lambda value: _marks(value), 'True, False, "auto" or a list of stage names or patterns'),
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


def _marks(value: Any) -> bool:
    return is_flag(value) or value == AUTO or (not is_text(value) and list_of(is_text)(value))


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
        return f"{type(value).__name__} {describe_value(vars(value))}"
    # The repr of other values differs between processes: describes functions by name, other objects by class.
    while isinstance(value, functools.partial):
        value = value.func
    if not callable(value):
        return f"a {type(value).__name__}"
    name = getattr(value, "__qualname__", type(value).__qualname__).rpartition("<locals>.")[2]
    code = getattr(value, "__code__", None)
    return name if code is None else f"{name} of line {code.co_firstlineno}"
