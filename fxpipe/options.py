"""Options: what ``fxpipe.compile`` is asked for. Each option stands here once, with its default, and is checked here.

A new option is a field of ``Options`` and a parameter of ``compile``, which hands it over; a test compares.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import CodeType
from typing import Any, Literal, cast

from fxpipe.errors import RunError
from fxpipe.hardware import Hardware
from fxpipe.packed import BatchDim, Offsets, Packed, check_counted, is_batch_dim
from fxpipe.precision import Precision
from fxpipe.validation import (
    Expected,
    check,
    is_flag,
    is_list,
    is_mapping,
    is_number,
    is_text,
    is_whole,
    list_of,
    one_or_each,
    shown,
)

AUTO = "auto"
TracerName = Literal["auto", "symbolic", "export", "record"]
Zero = Literal[0, 1, 2, 3]
ZeroScope = Literal["node", "data"]
Recompute = bool | Sequence[str] | Literal["auto"]


@dataclass(frozen=True, eq=False)
class Options:
    """The options of ``compile``, whose docstring says what each of them means.

    What is ``Any`` here belongs to packages above (a schedule, boundaries, passes, weights): they look names up.

    Raises:
        RunError: a value is out of its range, or does not go with another.
    """

    loss_fn: Callable[..., Any] | None = None
    boundaries: Any = ()
    microbatches: int | None = None
    batch_dim: BatchDim = 0
    schedule: Any = "1f1b"
    placement: Mapping[str, int | Sequence[int] | Literal["all"]] | None = None
    tracer: TracerName = "auto"
    auto_opaque: bool = True
    example_args: Sequence[Any] | None = None
    example_kwargs: Mapping[str, Any] | None = None
    zero: Zero = 0
    zero_scope: ZeroScope = "node"
    bucket_cap_mb: float = 25.0
    precision: Precision | None = None
    loss_weight: Callable[..., Any] | None = None
    recompute: Recompute = False
    memory_per_rank: float | None = None
    hardware: Hardware | str | None = None
    init_fn: Callable[..., Any] | None = None
    checkpoint: Any = None
    parallelize: Callable[..., None] | None = None
    stage_compiler: Callable[..., Any] | None = None
    check_batches: bool = True
    check_capture: bool = True
    error_if_nonfinite: bool = False
    timeout: float = 300.0
    passes: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not field.default:
                check(RunError, _KINDS, **{field.name: value})
        if self.microbatches is not None and self.microbatches < 1:
            raise RunError(f"microbatches={self.microbatches}; at least 1 is needed")
        check_counted(self.batch_dim)
        if self.zero not in (0, 1, 2, 3):
            raise RunError(f"zero={self.zero!r}; write 0, 1 (optimizer state), 2 (and gradients) or 3 (and parameters)")
        if self.zero_scope not in ("node", "data"):
            raise RunError(f'zero_scope={self.zero_scope!r}; write "node" or "data"')
        if not 0 < self.bucket_cap_mb < math.inf:
            raise RunError(f"bucket_cap_mb={self.bucket_cap_mb}; write a size above 0, in MiB")
        if self.memory_per_rank is not None:
            if not 0 < self.memory_per_rank < 1e30:
                raise RunError(f"memory_per_rank={shown(self.memory_per_rank)}; write a number above 0, in bytes")
            object.__setattr__(self, "memory_per_rank", float(self.memory_per_rank))  # numpy's own are not JSON's
        if not isinstance(self.recompute, str):
            given = self.recompute
            object.__setattr__(self, "recompute", bool(given) if is_flag(given) else tuple(cast(Sequence[str], given)))
        Hardware.of(self.hardware)
        if self.recompute == AUTO and self.memory_per_rank is None:
            raise RunError(
                'recompute="auto" recomputes as little as fits memory_per_rank=, which is not given; write '
                "memory_per_rank=40e9, in bytes, or recompute=True"
            )
        if not 0 < self.timeout < 10**7:
            raise RunError(f"timeout={self.timeout}; write a number of seconds above 0, such as timeout=300")
        if self.precision is not None and not isinstance(self.precision, Precision):
            raise RunError(f"precision is {self.precision!r}; write fxpipe.Precision(compute=torch.bfloat16)")
        if self.parallelize is not None:
            self._check_parallelize()

    @property
    def has_example(self) -> bool:
        return self.example_args is not None or self.example_kwargs is not None

    def for_calls(self) -> Options:
        """What is needed after ``compile``, too; the rest may hold memory that the user wants back."""
        return dataclasses.replace(self, example_args=None, example_kwargs=None, init_fn=None, checkpoint=None)

    def microbatches_on(self, ranks: int) -> int:
        """How many a batch is cut into: as asked for, or 4 for each pipe rank, or 1 where there is one rank."""
        return self.microbatches or (4 * ranks if ranks > 1 else 1)

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_cap_mb * 2**20)

    @property
    def in_common(self) -> str:
        """What, beside the program and its schedule, must be the same on all ranks, in words."""
        return (
            f"batch_dim={describe_value(self.batch_dim)}, loss_weight {'given' if self.loss_weight else 'not given'}, "
            f"zero={self.zero}, zero_scope={self.zero_scope}, bucket_cap_mb={self.bucket_cap_mb}, {self.precision}, "
            f"check_batches={self.check_batches}, error_if_nonfinite={self.error_if_nonfinite}"
        )

    @property
    def facts(self) -> dict[str, str]:
        """Option → its value in words, of those that must be the same on all ranks. Of functions names and code
        are compared, and not what they close over; the programs that come of all this are compared later."""
        fields = [field for field in dataclasses.fields(self) if field.name not in _OF_ONE_RANK]
        return {field.name: describe_value(getattr(self, field.name)) for field in fields}

    def _check_parallelize(self) -> None:
        if self.zero:
            raise RunError(
                f"zero={self.zero} and parallelize= both decide how parameters lie over the data axis; leave out "
                'zero=, and write fully_shard(module, mesh=mesh["data"]) in parallelize'
            )
        if self.precision is not None:
            raise RunError(
                "precision= and parallelize= both decide the types of parameters; leave out precision=, and write "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(...)) in parallelize, or call under torch.autocast"
            )
        if self.tracer not in ("auto", "record"):  # those that leave modules whole
            raise RunError(
                f'tracer="{self.tracer}" takes modules apart, and parallelize= needs them whole; write tracer="record"'
            )
        if self.stage_compiler is not None:
            raise RunError(
                "stage_compiler= and parallelize= both replace what a stage runs; call module.compile() on the parts "
                "of the stage in parallelize"
            )


_OF_ONE_RANK = {"example_args", "example_kwargs", "checkpoint"}
"""Options that may differ: a rank is given its own data, and the path of its own disk."""


_KINDS: Mapping[str, Expected] = {
    "loss_fn": Expected(callable, "a function (output, target) -> loss"),
    "microbatches": Expected(is_whole, "a whole number"),
    "batch_dim": Expected(
        is_batch_dim, "a dimension, or a dict input -> dimension, None, fxpipe.Packed(...) or fxpipe.Offsets()"
    ),
    "placement": Expected(
        lambda value: is_mapping(value) and all(one == "all" or one_or_each(is_whole)(one) for one in value.values()),
        'a dict stage name -> pipe rank, or several, (0, 1, 2), or "all"',
    ),
    "tracer": Expected(is_text, "a name out of fxpipe.TRACERS"),
    "auto_opaque": Expected(is_flag, "True or False"),
    "example_args": Expected(is_list, "the inputs as a tuple, (x,) where there is one"),
    "example_kwargs": Expected(
        lambda value: is_mapping(value) and all(map(is_text, value)), "a dict input name -> value"
    ),
    "zero": Expected(is_whole, "0, 1 (optimizer state), 2 (and gradients) or 3 (and parameters)"),
    "bucket_cap_mb": Expected(is_number, "a size in MiB"),
    "loss_weight": Expected(callable, "a function of a micro-batch's inputs"),
    "recompute": Expected(
        lambda value: is_flag(value) or value == AUTO or (not is_text(value) and list_of(is_text)(value)),
        'True, False, "auto" or a list of stage names',
    ),
    "memory_per_rank": Expected(is_number, "a number of bytes, such as 80e9"),
    "hardware": Expected(
        lambda value: isinstance(value, Hardware) or is_text(value),
        'the name of a GPU, such as "h100", or fxpipe.Hardware(...)',
    ),
    "init_fn": Expected(callable, "a function (module) -> None"),
    "parallelize": Expected(callable, "a function (stage_module, mesh) -> None"),
    "stage_compiler": Expected(callable, "a function such as torch.compile"),
    "check_batches": Expected(is_flag, "True or False"),
    "check_capture": Expected(is_flag, "True or False"),
    "error_if_nonfinite": Expected(is_flag, "True or False"),
    "timeout": Expected(is_number, "a number of seconds"),
    "passes": Expected(
        lambda value: list_of(callable)(value) and len(value) > 0, "a list of functions Program -> Program"
    ),
}
"""Option → whether a value can be meant, and what it is in words. What is not here is checked by its own package."""


_PLAIN = (str, int, float, type(None), Precision, Hardware)


def describe_value(value: Any) -> str:
    """Without addresses, and of a function its name and a digest of its code: what it closes over may be a rank's."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{describe_value(key)}: {describe_value(one)}' for key, one in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Packed | Offsets):
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        return f"{type(value).__name__} {describe_value(given)}"
    return _function(value) if callable(value) else f"a {type(value).__name__}"


def _function(value: Callable[..., Any]) -> str:
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__qualname__", type(value).__qualname__).rpartition("<locals>.")[2]
    runs = value if isinstance(value, type) else getattr(value, "forward", value)
    called = (vars(cls).get("__call__") for cls in type(runs).__mro__)
    code: CodeType | None = next(filter(None, (getattr(one, "__code__", None) for one in (runs, *called))), None)
    return f"{name}, code {_digest(code)}," if code is not None else name


def _digest(code: CodeType) -> str:
    code_text = repr((code.co_code, code.co_names, [_constant(one) for one in code.co_consts]))
    return hashlib.blake2b(code_text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _digest(value)
    if isinstance(value, tuple | frozenset):
        parts = list(map(_constant, value))
        return str(parts if isinstance(value, tuple) else sorted(parts))
    return repr(value)
