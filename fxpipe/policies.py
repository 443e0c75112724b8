"""Policies: groups of options of ``fxpipe.compile`` that belong together. Each has a short form, such as ``zero=1``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from fxpipe.errors import RunError
from fxpipe.validation import Expected, check, is_flag, is_number, is_text, is_whole

TracerName = Literal["auto", "symbolic", "export", "record"]
ZeroLevel = Literal[0, 1, 2, 3]
ZeroScope = Literal["node", "data"]


class _Checked:
    """The base of policies: checks each field."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            try:
                check(RunError, _FITTING, **{field.name: getattr(self, field.name)})
            except RunError as error:
                raise RunError(f"fxpipe.{type(self).__name__}: {error}") from None


@dataclass(frozen=True)
class Zero(_Checked):
    """The state that is sharded over the data axis: ``zero=1`` is ``zero=fxpipe.Zero(1)``.

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

    Raises:
        RunError: a field is out of its range.
    """

    level: ZeroLevel = 0
    """0: nothing. 1: optimizer state. 2: gradients, too. 3: parameters, too. With 1 and 2 step by
    ``forward_backward.optimizer``."""
    scope: ZeroScope = "node"
    """"node": sharded over the replicas inside the node, and replicated across nodes. "data": over all replicas."""
    bucket_mb: float = 25.0
    """The size of the buckets in which gradients are summed, in MiB. The first bucket is smaller. With level 3 the
    parameters of an all-gather have at least this size."""

    @property
    def bucket_bytes(self) -> int:
        """The size of a bucket in bytes."""
        return int(self.bucket_mb * 2**20)


@dataclass(frozen=True)
class Tracing(_Checked):
    """How a model is captured: ``tracer="export"`` is ``tracer=fxpipe.Tracing("export")``.

    Raises:
        RunError: a field is out of its range.
    """

    name: TracerName = "auto"
    """A name out of ``fxpipe.TRACERS``. "auto" tries the tracers in turn."""
    opaque: bool = True
    """Whether "auto" keeps parts opaque that no tracer can capture: up to 8, of at most half of a step's FLOPs.
    ``.stages`` says which. False: fxpipe refuses such a part, and names the rule for ``boundaries``."""
    check: bool = True
    """Whether ``compile`` compares the stages with the model, forward and backward, on two micro-batches of the
    example, and "auto" tries the next tracer where they differ. ``.stages`` says where this is left out: at a high
    cost, without an example's numbers, or if a rank holds a part of the model."""


@dataclass(frozen=True)
class Checks(_Checked):
    """What every step checks: ``checks=fxpipe.Checks(timeout=600)``.

    Raises:
        RunError: a field is out of its range.
    """

    batches: bool = True
    """Whether ranks compare digests of the inputs that they share. They compare in the first 3 calls of each capture
    and every 100th, and in the first 3 calls with each of the first 8 kinds of batch. A difference raises a RunError
    one call later. fxpipe also warns of replicas with equal batches."""
    nonfinite: Literal["warn", "raise"] = "warn"
    """What happens if a loss is inf or nan. "warn": one warning, one call late. "raise": a RunError in the call itself,
    on all ranks and before an optimizer steps. Each call then waits for its loss."""
    timeout: float = 300.0
    """Seconds that a wait may take, on the CPU, before this rank names the event that it waits for, warns all others
    and raises. While other ranks capture, compile or save, a wait may take longer, by up to 12 times this."""


LEVEL = Expected(
    lambda value: is_whole(value) and 0 <= value <= 3,
    "0, 1 (optimizer state), 2 (and gradients) or 3 (and parameters)",
)
_FITTING: Mapping[str, Expected] = {
    "level": LEVEL,
    "scope": Expected(lambda value: value in ("node", "data"), '"node" or "data"'),
    "bucket_mb": Expected(lambda value: is_number(value) and 0 < value < math.inf, "a size above 0, in MiB"),
    "name": Expected(is_text, "a name out of fxpipe.TRACERS"),
    "nonfinite": Expected(lambda value: value in ("warn", "raise"), '"warn" or "raise"'),
    "timeout": Expected(
        lambda value: is_number(value) and 0 < value < 10**7, "a number of seconds above 0, such as 300"
    ),
    **dict.fromkeys(("opaque", "check", "batches"), Expected(is_flag, "True or False")),
}

CHECKS = Checks()
"""The default of ``checks=``."""
