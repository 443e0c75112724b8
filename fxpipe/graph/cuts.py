"""Cuts: the stages that a search found, as a value that prints, is saved, and replaces the search."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate

from fxpipe.errors import PartitionError, printable
from fxpipe.graph.program import Program
from fxpipe.graph.ranks import Placement, as_placement, named, ranks_of
from fxpipe.notebook import Tabular
from fxpipe.plain_data import digest_of
from fxpipe.small_file import write_whole


@dataclass(frozen=True)
class Cuts(Tabular):
    """The stages that ``boundaries="auto"`` found, and their ranks: ``compile(boundaries=cuts)`` skips the search.

    ``forward_backward.cuts`` and ``preview(...).cuts`` return it. ``placement=`` may place the same stages otherwise.
    """

    stages: Mapping[str, tuple[str, ...]]
    """Stage name → its operations, by their names in the captured program."""
    placement: Placement
    """The rank, or ranks, of each stage."""
    tracer: str
    """The tracer that captured the program."""
    program: int
    """A digest of the program's operations."""

    @staticmethod
    def of(program: Program, placement: Placement) -> Cuts:
        """The cuts of a program that has stages."""
        nodes: dict[int, list[str]] = {stage: [] for stage in range(len(program.stage_names))}
        for name, stage in program.stage_of.items():
            nodes[stage].append(name)
        stages = {name: tuple(nodes[stage]) for stage, name in enumerate(program.stage_names)}
        return Cuts(stages, placement, program.tracer, _digest(program))

    def applied(self, program: Program) -> Program:
        """The program with these stages; PartitionError if it is another program than the cuts were found for."""
        if (self.tracer, self.program) != (program.tracer, _digest(program)):
            raise PartitionError(
                f"boundaries= is given cuts of another program: {self.tracer} captured the model for them, "
                f"{program.tracer} now, or the model, fxpipe or torch has changed since. Search again, with "
                'boundaries="auto", and save forward_backward.cuts'
            )
        stage_of = {name: stage for stage, names in enumerate(self.stages.values()) for name in names}
        return program.replace(stage_of=stage_of, gathered={})

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the cuts to a file, which ``read`` reads. OSError if writing fails."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Cuts:
        """Returns the cuts that ``to_json`` wrote; PartitionError if the file holds none. OSError if reading fails."""
        try:
            parts = json.loads(Path(path).read_text())
            stages = {str(name): tuple(map(str, nodes)) for name, nodes in parts["stages"].items()}
            placement = as_placement(parts["placement"], tuple(stages), PartitionError)
            return Cuts(stages, placement, str(parts["tracer"]), int(parts["program"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PartitionError(f"{path} holds no cuts of fxpipe: {error!r}; write them by cuts.to_json()") from None

    def __str__(self) -> str:
        entries = zip(self.stages.items(), self.placement, strict=True)
        rows = [
            (name, ", ".join(map(str, ranks_of(ranks))), len(nodes), f"{nodes[0]} to {nodes[-1]}" if nodes else "")
            for (name, nodes), ranks in entries
        ]
        headers = ["stage", "rank", "operations", "first and last"]
        grid = tabulate(rows, headers, disable_numparse=True, colalign=["left"] * 2)
        return printable(f"{grid}\ncuts of the program that {self.tracer} captured")

    def __repr__(self) -> str:
        where = ", ".join(f"{name} on {named(ranks)}" for name, ranks in zip(self.stages, self.placement, strict=True))
        return printable(f"<Cuts {self.program:x}: {where}>")


def _digest(program: Program) -> int:
    return digest_of(f"{node.op} {node.name}" for node in program.nodes)
