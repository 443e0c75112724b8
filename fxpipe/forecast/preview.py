"""Preview: the bytes on each rank and the seconds of a step that a plan would take, without a run."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tabulate import tabulate

from fxpipe.errors import printable
from fxpipe.forecast.uneven import UnevenPreview
from fxpipe.graph.cuts import Cuts
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.notebook import Tabular
from fxpipe.plan.plan import Plan
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.table import in_seconds
from fxpipe.small_file import write_whole


@dataclass(frozen=True)
class RankPreview:
    """The most bytes that a rank of a pipeline holds; None if no example gives shapes."""

    stages: tuple[str, ...]
    parameters: float
    """The bytes of parameters and buffers between steps."""
    gradients: float
    """The bytes of gradients after the backward, until the optimizer's step."""
    optimizer: float
    """The bytes of the optimizer's state and master weights, from the second step on."""
    whole: float
    """The bytes of unsharded tensors while a step runs. ``zero=2``: gradients; ``zero=3``: gradients and parameters."""
    activations: float | None
    """The most bytes kept for the backwards of micro-batches in flight, without the temporary memory of operators."""
    messages: float | None
    """The most bytes of message buffers at a time."""
    batch: float | None
    """The bytes of the inputs of the rank's stages, over all micro-batches."""
    host: float = 0.0
    """The most bytes of offloaded activations in the host's memory, which ``total`` does not count."""

    @property
    def total(self) -> float:
        """The sum of all known bytes."""
        return sum(getattr(self, name) or 0.0 for name in _PARTS)

    def as_dict(self) -> dict[str, Any]:
        """The figures in whole bytes; ``total`` is the sum of those on the device."""
        sizes = {name: _ceil(getattr(self, name)) for name in _PARTS}
        total = sum(size or 0 for size in sizes.values())
        return {"stages": list(self.stages), **sizes, "total": total, "host": _ceil(self.host)}


_PARTS = ("parameters", "gradients", "optimizer", "whole", "activations", "messages", "batch")


@dataclass(frozen=True)
class Preview(Tabular):
    """The plan that ``compile`` would run; prints as stages, table and figures. ``ranks``: the ranks of a pipeline;
    each represents its replicas.

    ``seconds``, ``flops`` and ``utilisation`` are None without speeds in ``hardware=``, and without an example.
    """

    plan: Plan
    timeline: Timeline
    """The table, simulated at costs from shapes."""
    ranks: tuple[RankPreview, ...]
    memory: float | None
    """The bytes that a rank may keep: the memory of ``hardware=``."""
    seconds: float | None
    """The seconds of a call: forward, backward, gradient sums and gathers, without the optimizer's own step."""
    flops: float | None
    """The FLOPs of the model's matrix products in a step, on all ranks; recomputed products count once."""
    utilisation: float | None
    """Model FLOPs utilisation: the seconds of these products at the devices' peak / the seconds of a step."""
    inside_nodes: float | None
    """The bytes that all ranks together send inside of their nodes in a step: messages, gradients, parameters."""
    between_nodes: float | None
    """The bytes that all ranks together send to other nodes in a step."""
    saving: str = ""
    """The savings of recomputation, in words, if ``recompute=`` asks for it."""
    what: str = ""
    """The assumptions behind the figures, in words."""
    cuts: Cuts | None = None
    """The stages that ``boundaries="auto"`` found, for ``compile(boundaries=...)``; None where cuts are named."""
    uneven: UnevenPreview | None = None
    """The times of the batches of ``costs=``; None without ``costs=``."""

    @property
    def graph(self) -> StageGraph:
        """The stages, with the bytes of the values between them."""
        return self.plan.graph

    @property
    def schedule(self) -> Schedule:
        """The table that would run."""
        return self.plan.schedule

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time in the table, at costs from shapes."""
        return self.timeline.bubble

    @property
    def fits(self) -> bool | None:
        """Whether every rank's bytes are at most ``memory``. None if ``memory`` is not known, or if activations are not
        known and the other bytes fit."""
        if self.memory is None:
            return None
        # The known bytes may already exceed the memory; a rank fits for certain only if all its bytes are known.
        if any(rank.total > self.memory for rank in self.ranks):
            return False
        return None if any(rank.activations is None for rank in self.ranks) else True

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data: whole bytes, seconds and fractions of 1."""
        names = ("fits", "seconds", "bubble", "flops", "utilisation")
        return {
            "stages": [self._stage(number) for number in range(len(self.graph))],
            "schedule": self.schedule.name,
            "microbatches": self.schedule.microbatches,
            "ranks": [rank.as_dict() for rank in self.ranks],
            **{name: getattr(self, name) for name in names},
            **{name: _ceil(getattr(self, name)) for name in ("memory", "inside_nodes", "between_nodes")},
            "uneven": self.uneven and [dict(vars(run)) for run in self.uneven.runs],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes ``as_dict()`` to a file. OSError if writing fails."""
        write_whole(path, json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    def __str__(self) -> str:
        parts = [str(self.graph), str(self.timeline), self.saving, self._memory, self._figures, self.what]
        parts.append(str(self.uneven or ""))
        return printable("\n".join(filter(None, parts)))

    def __repr__(self) -> str:
        return f"<Preview of {self.graph!r} by {self.schedule!r}>"

    def _stage(self, number: int) -> dict[str, Any]:
        stage, sizes = self.graph[number], self.graph.bytes_of
        sends: dict[str, int | None] = {}
        for edge in stage.outputs:
            name = self.graph.names[edge.target]
            # Several values may go to one stage.
            sends[name] = sends.get(name, 0) + sizes[edge] if edge in sizes else None  # type: ignore[operator]
        return {
            "name": stage.name,
            "rank": self.graph.placement[number],
            "parameters": sum(parameter.numel() for parameter in stage.parameters.values()),
            "peak_in_flight": self.timeline.peak_in_flight[number],
            "sends": sends,
        }

    @cached_property
    def _memory(self) -> str:
        """The table of bytes, with a line for each rank."""
        # "whole" is 0 without zero=2 and 3, and then has no column.
        columns = [name for name in _PARTS if name != "whole" or any(rank.whole for rank in self.ranks)]
        unit, scale = unit_of(max(rank.total for rank in self.ranks))
        rows = []
        for number, rank in enumerate(self.ranks):
            sizes = [scaled(getattr(rank, name), scale) for name in columns]
            part = [f"{rank.total / self.memory:.0%}"] if self.memory else []
            rows.append([number, *sizes, scaled(rank.total, scale), *part])
        names = ["whole in a step" if name == "whole" else name for name in columns]
        of = [f"of {scaled(self.memory, scale)}"] if self.memory else []
        headers = ["rank", *names, f"sum, {unit}", *of]
        return tabulate(rows, headers, disable_numparse=True, colalign=["right"] * len(headers))

    @property
    def _figures(self) -> str:
        facts = []
        if self.seconds is not None:
            facts.append(f"a step takes {in_seconds(self.seconds)}")
        if self.utilisation is not None and self.flops is not None:
            facts.append(f"{self.flops / 1e12:,.4g} TFLOP of products: {self.utilisation:.1%} of the devices' peak")
        if self.between_nodes is not None:
            unit, scale = unit_of(self.between_nodes)
            facts.append(f"{scaled(self.between_nodes, scale)} {unit} between nodes")
        return ", ".join(facts)


def _ceil(size: float | None) -> int | None:
    return None if size is None else math.ceil(size)


def unit_of(most: float) -> tuple[str, float]:
    """The unit for sizes up to ``most`` bytes, and the bytes of the unit."""
    units = ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)
    return next(((name, size) for name, size in units if most >= size), units[-1])


def scaled(size: float | None, scale: float) -> str:
    """A number of bytes in a unit, to three digits."""
    if size is None:
        return "?"
    number = size / scale
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}" if number >= 0.005 else f"{number:.2f}"
