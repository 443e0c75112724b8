"""Choice: the plans that ``fxpipe.choose`` has simulated, in order, as values and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from fxpipe.distributed.topology import Topology
from fxpipe.errors import printable
from fxpipe.forecast.preview import Preview, scaled, unit_of
from fxpipe.hardware import Hardware
from fxpipe.notebook import Tabular
from fxpipe.policies import Zero
from fxpipe.precision import Precision
from fxpipe.schedules.table import in_seconds

FULL = 0.9
"""The part of the memory above which a plan leaves little room for the bytes that a preview does not count."""
ROWS = 12
"""The most plans in the printed table."""


@dataclass(frozen=True)
class ChosenPlan(Tabular):
    """A plan that was simulated: what to pass to ``fxpipe.compile``, and what ``fxpipe.preview`` says of it."""

    topo: Topology
    options: Mapping[str, Any]
    """The options that ``choose`` set: ``microbatches``, ``zero``, ``recompute``, ``offload`` and ``hardware``."""
    given: Mapping[str, Any]
    """The options of the call of ``choose``."""
    preview: Preview
    rows: int
    """The rows of a micro-batch."""
    limit: float | None
    """The bytes that a rank may use. ``hardware`` in ``options`` may have less, so that messages have room."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has at most ``limit`` bytes."""
        return self.limit is None or self.bytes <= self.limit

    @property
    def bytes(self) -> float:
        """The bytes of the fullest rank."""
        return max(rank.total for rank in self.preview.ranks)

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.preview.seconds or 0.0

    @property
    def code(self) -> str:
        """The call of ``fxpipe.compile``, to paste. ``batch``, the example, has a replica's rows. An option without a
        short text has its own name as its value."""
        nodes = "" if self.topo.ranks_per_node is None else f", ranks_per_node={self.topo.ranks_per_node}"
        options = {**self.given, **self.options}
        comments = {}
        if self.limit is not None and self.preview.memory is not None and self.preview.memory < self.limit:
            comments["hardware"] = f"  # of {self.limit:.4g}: searches do not count messages, which need the rest"
        lines = "".join(
            f"    {name}={written(name, value)},{comments.get(name, '')}\n" for name, value in options.items()
        )
        rows = self.rows * self.preview.schedule.microbatches
        lines += f"    example_kwargs=batch,  # of a replica: {rows} rows\n"
        return (
            f"topo = fxpipe.Topology({list(self.topo.axes)}{nodes})\n"
            f"forward_backward = fxpipe.compile(\n    model,\n    topo,\n{lines})"
        )

    def __str__(self) -> str:
        return printable(f"{self.preview}\n\n{self.code}")

    def row(self, axes: list[str], unit: float) -> list[str]:
        """The plan's line of the table. ``axes``: the names of the axes that have a column. ``unit``: in bytes."""
        preview = self.preview
        sizes = dict(self.topo.axes)
        options = {"recompute": False, "offload": False, **self.given, **self.options}
        traffic = [preview.inside_nodes, preview.between_nodes]
        return [
            *(str(sizes.get(axis, 1)) for axis in axes),
            f"{preview.schedule.microbatches} x {self.rows}",
            _zero_in_words(options["zero"]),
            *(_in_words(options[name]) for name in ("recompute", "offload")),
            in_seconds(self.seconds),
            f"{preview.bubble:.1%}",
            scaled(self.bytes, unit),
            "" if self.limit is None else f"{self.bytes / self.limit:.0%}" + ", too much" * (not self.fits),
            *("" if size is None else scaled(size, unit) for size in traffic),
        ]


@dataclass(frozen=True)
class Choice(Tabular):
    """The plans that ``fxpipe.choose`` has simulated. Prints as a table, with the best plan's call to paste."""

    plans: tuple[ChosenPlan, ...]
    """Plans that fit first, the fastest first; then plans that do not fit, the smallest first."""
    count: int
    """The number of plans that were compared."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """A plan in words → why it does not fit, or has no table."""
    estimates: Mapping[str, float] = field(default_factory=dict)
    """``recompute`` and ``offload``, in words → the least estimated seconds of plans that were not simulated."""
    remedies: tuple[tuple[str, ChosenPlan], ...] = ()
    """If no plan fits: the options to change, in words → the plan with them, the smallest first."""

    @property
    def best(self) -> ChosenPlan:
        """The fastest plan that fits, or the smallest plan if none fits."""
        return self.plans[0]

    @property
    def fits(self) -> bool:
        """Whether a plan fits the memory; True if there is no limit."""
        return self.best.fits

    def __str__(self) -> str:
        axes = list(dict.fromkeys(name for plan in self.plans for name, _ in plan.topo.axes))
        name, unit = unit_of(max(plan.bytes for plan in self.plans))
        headers = [*axes, "micro-batches", "zero", "recompute", "offload", "a step", "bubble"]
        headers += [f"fullest, {name}", "of memory", f"sent in nodes, {name}", "between"]
        rows = [plan.row(axes, unit) for plan in self.plans[:ROWS]]
        columns = [column for column in range(len(headers)) if any(row[column] for row in rows)]
        table = tabulate(
            [[row[column] for column in columns] for row in rows],
            [headers[column] for column in columns],
            disable_numparse=True,
            colalign=["right"] * len(columns),
        )
        others = self.count - len(self.plans) - len(self.refused)
        facts = [f"{len(self.plans)} of {self.count} plans are simulated"]
        facts += [f"{others} are slower or larger by their estimates"] * (others > 0)
        facts += [f"{len(self.refused)} do not fit, or have no table"] * bool(self.refused)
        ways = [f"{way}: {in_seconds(seconds)}" for way, seconds in self.estimates.items()]
        least = [f"the others take at least, by their estimates: {', '.join(ways)}"] * bool(ways)
        lines = [table, "; ".join(facts), *least, *self._advice(), "", self.best.code]
        return printable("\n".join(lines))

    def _advice(self) -> list[str]:
        """What makes the plan fit, if none fits."""
        if self.fits:
            full = self.best.limit is not None and self.best.bytes > FULL * self.best.limit
            less = f"{FULL:.0%} of the memory leaves room for temporaries, the allocator and the driver: memory="
            return [f"{less}{FULL * (self.best.limit or 0.0):.4g}"] if full else []
        name, unit = unit_of(self.best.bytes)
        memory = scaled(self.best.limit, unit)
        lines = [f"no plan fits {memory} {name} a rank; the nearest takes {scaled(self.best.bytes, unit)}"]
        for words, plan in self.remedies:
            fits = "fits" if plan.fits else "does not fit"
            lines.append(f"with {words}: {scaled(plan.bytes, unit)} {name}, {fits}, {in_seconds(plan.seconds)} a step")
        return lines


def written(name: str, value: Any) -> str:
    """An option's value, as a user writes it."""
    if isinstance(value, Zero):
        zero = [f"{value.level}", *[f'scope="{value.scope}"'] * (value.scope != Zero.scope)]
        zero += [f"bucket_mb={value.bucket_mb:g}"] * (value.bucket_mb != Zero.bucket_mb)
        return zero[0] if len(zero) == 1 else f"fxpipe.Zero({', '.join(zero)})"
    if isinstance(value, Hardware) and value.is_of_sheet:
        return f'fxpipe.Hardware.named("{value.source}", memory={value.memory})'
    if isinstance(value, Hardware | Precision):
        return f"fxpipe.{value}"
    return repr(value) if isinstance(value, str | int | float | bool) else name


def _in_words(option: Any) -> str:
    return {False: "", True: "all"}.get(option, "named") if not isinstance(option, str) else option


def _zero_in_words(option: Any) -> str:
    zero = option if isinstance(option, Zero) else Zero(option)
    return f"{zero.level}" + f" {zero.scope}" * (zero.level > 0)
