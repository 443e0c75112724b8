"""Comparison: finds the first number in which two recorded runs differ, and how the difference grows from there."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.notebook import Tabular
from fxpipe.numerics.recording import (
    GRADIENT,
    INPUT,
    LOSS,
    PARAMETER,
    PARAMETER_GRADIENT,
    VALUE,
    RecordedTensor,
    entries_of,
)

Key = tuple[int, int, str, str]
"""(step, micro-batch, kind, name)."""
_WORDS = {
    INPUT: "the input `{}`",
    VALUE: "the value `{}`",
    LOSS: "the loss",
    GRADIENT: "the gradient of the value `{}`",
    PARAMETER_GRADIENT: "the gradient of the parameter `{}`",
    PARAMETER: "the parameter `{}`",
}
ROUNDING = torch.finfo(torch.float32).eps / 2
"""The norm of a gradient that is rounding alone, at most, relative to the norm of the step's whole gradient."""
OTHER_TYPE = 1e-2
"""How much an input of 16 bits may differ from the same in 32."""
_ROWS = 20
"""The number of differences that a print shows."""


class Difference(NamedTuple):
    """A tensor that differs between the runs. ``relative``: largest |a − b| / largest |a| if both runs recorded the
    tensors in full (``is_exact``); else about ‖a − b‖ / ‖a‖; inf if shapes or the numbers of inf and nan differ."""

    entry: RecordedTensor
    relative: float
    is_exact: bool
    what: str = ""
    types: str = ""
    """The two types, if they differ."""

    def exceeds(self, rtol: float) -> bool:
        """Whether the tensors differ by more than ``rtol``. An estimate of 0 proves nothing: changes may cancel."""
        return bool(self.what) or self.relative > rtol or (rtol == 0 and not self.is_exact)

    def row(self) -> tuple[object, ...]:
        """The cells of a printed table."""
        entry = self.entry
        microbatch = entry.microbatch if entry.microbatch >= 0 else ""
        return entry.step, microbatch, entry.kind, entry.name, self.what or f"{self.relative:.1e}"

    def __str__(self) -> str:
        entry = self.entry
        where = f"step {entry.step}" if entry.step >= 0 else "before the first step"
        where += f", micro-batch {entry.microbatch}" * (entry.microbatch >= 0)
        details = ", ".join(filter(None, (entry.what, entry.boundary if entry.boundary != entry.name else "")))
        subject = _WORDS[entry.kind].format(entry.name) + f" ({details})" * bool(details)
        if self.what:
            return f"{where}: {subject} {self.what}"
        size = f"{self.relative:.2g} of its largest" if self.is_exact else f"about {self.relative:.1g} of its norm"
        return f"{where}: {subject} differs by {size}" + f", as {self.types}" * bool(self.types)


@dataclass(frozen=True)
class Bisection(Tabular):
    """The comparison of two runs. ``print`` shows the first difference, and how it grows."""

    differences: tuple[Difference, ...]
    """The tensors that differ by more than ``rtol``, in the order in which a step makes them."""
    equal: int
    """How many tensors before the first difference have equal bits."""
    close: int
    """How many tensors before the first difference have other bits, and differ by ``rtol`` at most."""
    only_in_first: tuple[str, ...]
    """The names, and steps, that only the first run recorded."""
    only_in_second: tuple[str, ...]
    other_rows: tuple[tuple[int, int], ...]
    """The (step, micro-batch) pairs whose inputs differ: their values are not compared."""
    rounding: tuple[str, ...] = ()
    """The parameters that are not compared with a tolerance: in both runs their gradients are rounding alone."""

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        before = f"{self.equal:,} tensors before it have equal bits"
        before += f", and {self.close:,} differ within the tolerance" * bool(self.close)
        lines = [f"{self.first}; {before}" if self.first else f"no difference: {before.replace(' before it', '')}"]
        if self.other_rows:
            step, microbatch = self.other_rows[0]
            lines.append(
                f"{len(self.other_rows)} micro-batches have other rows in the two runs, first micro-batch {microbatch} "
                f"of step {step}: their values are not compared"
            )
        if self.rounding:
            lines.append(
                f"the gradients of {len(self.rounding)} parameters are rounding alone, first {self.rounding[0]}: these "
                "parameters are not compared"
            )
        for which, names in (("first", self.only_in_first), ("second", self.only_in_second)):
            if names:
                more = f" and {len(names) - 5} more" * (len(names) > 5)
                lines.append(f"only the {which} run has {', '.join(names[:5])}{more}")
        if len(self.differences) > 1:
            rows = [difference.row() for difference in self.differences[:_ROWS]]
            lines += ["", tabulate(rows, ["step", "micro-batch", "kind", "name", "difference"], disable_numparse=True)]
            lines += [f"… and {len(self.differences) - _ROWS:,} more"] * (len(self.differences) > _ROWS)
        return "\n".join(lines)


def bisect(first: str | os.PathLike[str], second: str | os.PathLike[str], rtol: float = 0.0) -> Bisection:
    """Compares two runs that ``record_values`` or ``record_plain`` recorded.

    The order is a step's: each micro-batch's inputs, values, loss and gradients, then parameters' gradients, then
    parameters. Micro-batches are compared if their inputs have equal bits. Values are matched by their names in the
    captured program; if one run is of plain PyTorch, by the boundaries that they cross.

    Args:
        first: the folder of the first run.
        second: the folder of the second run.
        rtol: differences up to ``rtol`` are close: relative to the largest element with ``full=True`` in both runs, to
            the norm otherwise.

    Raises:
        RunError: a folder has no recorded values, a line is no entry, or ranks of one run lack a part of a tensor.
    """
    runs = [_Run.read(Path(folder)) for folder in (first, second)]
    by_boundary = any(run.is_plain for run in runs)
    mine, its = (run.tensors(by_boundary) for run in runs)
    its = _aligned(mine, its) if by_boundary else its
    found = {key: mine[key].difference(its[key]) for key in mine if key in its}
    inputs = {key: each for key, each in found.items() if key[2] == INPUT and each is not None}
    # Inputs of another type that differ by little are the same rows.
    other_rows = {key[:2] for key, each in inputs.items() if not (each.types and each.relative < OTHER_TYPE)}
    found = {key: each for key, each in found.items() if key[:2] not in other_rows}
    changed = {key: each for key, each in found.items() if each is not None and each.exceeds(rtol)}
    differences = [difference for run in runs for difference in run.copies_that_differ()]
    tiny = set() if rtol == 0 else _tiny_gradients(mine) & _tiny_gradients(its)
    rounding = tuple(dict.fromkeys(key[3] for key in changed if key[2] == PARAMETER_GRADIENT and key[3] in tiny))
    compared = [key for key in found if key[0] < 0 or key[1] >= 0 or key[3] not in rounding]
    close = [mine[key].entry for key in compared if found[key] is not None and key not in changed]
    differences += [changed[key] for key in compared if key in changed]
    differences.sort(key=lambda difference: _order(difference.entry))
    end = _order(differences[0].entry) if differences else (math.inf,)
    number_close = sum(_order(entry) < end for entry in close)
    equal = sum(_order(mine[key].entry) < end for key in compared) - number_close
    only = _missing(mine, its), _missing(its, mine)
    return Bisection(tuple(differences), equal, number_close, *only, tuple(sorted(other_rows)), rounding)


def _tiny_gradients(tensors: Mapping[Key, _Whole]) -> set[str]:
    """The parameters whose gradients may be rounding alone. Attention's key biases have no other gradient, because
    softmax takes them away; an optimizer such as Adam steps by the signs of the rounding."""
    squares, largest = dict[int, float](), dict[str, float]()
    gradients = [whole.entry for key, whole in tensors.items() if key[2] == PARAMETER_GRADIENT]
    for entry in gradients:
        squares[entry.step] = squares.get(entry.step, 0.0) + entry.fingerprint.squares
    for entry in gradients:
        share = entry.fingerprint.squares / (squares[entry.step] or 1.0)
        largest[entry.name] = max(largest.get(entry.name, 0.0), share)
    return {name for name, share in largest.items() if 0 < share < ROUNDING**2}


def _aligned(mine: Mapping[Key, _Whole], its: Mapping[Key, _Whole]) -> dict[Key, _Whole]:
    """Returns ``its`` with the values of a boundary under the names in ``mine``, if one run alone has some of them.

    A mask may be None in plain PyTorch and a tensor in a capture, and the values behind the mask have other numbers.
    Values with another shape than their namesake are matched by shape, if no other value of the boundary has it.
    """
    known = {key for key in its if key in mine and mine[key].entry.shape == its[key].entry.shape}
    by_shape: dict[object, tuple[list[Key], list[Key]]] = {}
    for side, tensors in enumerate((mine, its)):
        for key in tensors:
            if key[2] in (VALUE, GRADIENT) and key not in known:
                boundary = key[3].partition(", value")[0]
                by_shape.setdefault((key[:3], boundary, tensors[key].entry.shape), ([], []))[side].append(key)
    moved = {b[0]: a[0] for a, b in by_shape.values() if len(a) == len(b) == 1}
    stay = {key: whole for key, whole in its.items() if key not in moved and key not in moved.values()}
    return stay | {key: its[old] for old, key in moved.items()}


def _missing(run: Mapping[Key, _Whole], other: Mapping[Key, _Whole]) -> tuple[str, ...]:
    """What only ``run`` has: whole steps, or names."""
    steps, words = {key[0] for key in other if key[2] == INPUT}, dict[str, None]()
    for step, _, kind, name in (key for key in run if key not in other):
        missing = f"step {step}" if step >= 0 else "the parameters before the first step"
        whose = {GRADIENT: "the gradient of ", PARAMETER_GRADIENT: "the gradient of the parameter "}.get(kind, "")
        words[whose + name if step in steps else missing] = None
    return tuple(words)


def _order(entry: RecordedTensor) -> tuple[Any, ...]:
    """The place of an entry in the order in which steps make tensors: backward goes through the values in reverse."""
    last = {PARAMETER_GRADIENT: 1, PARAMETER: 2}.get(entry.kind, 0)
    order = -entry.order if entry.kind == GRADIENT else entry.order
    return entry.step, last, entry.microbatch, list(_WORDS).index(entry.kind), order


@dataclass(frozen=True)
class _Whole:
    """A tensor of a run: its disjoint parts. ``entry``: the first part, with the fingerprint of the whole."""

    folder: Path
    entry: RecordedTensor
    parts: tuple[RecordedTensor, ...]

    def difference(self, other: _Whole) -> Difference | None:
        """How ``other`` differs; None if all bits are equal."""
        mine, its = self.entry, other.entry
        if mine.shape != its.shape:
            return Difference(mine, math.inf, True, f"has shape {list(mine.shape)} and {list(its.shape)}")
        if mine.dtype == its.dtype and mine.fingerprint.bits == its.fingerprint.bits:
            return None
        counts = mine.fingerprint.nonfinite, its.fingerprint.nonfinite
        if counts[0] != counts[1]:
            return Difference(mine, math.inf, True, f"has {counts[0]:,} and {counts[1]:,} elements that are inf or nan")
        types = f"{mine.dtype} and {its.dtype}" * (mine.dtype != its.dtype)
        pairs = list(zip(self.parts, other.parts, strict=False))
        alike = [(a.start, a.count) for a in self.parts] == [(b.start, b.count) for b in other.parts]
        if alike and all(a.tensor and b.tensor for a, b in pairs):
            largest = max(_largest_difference(_elements(self.folder, a), _elements(other.folder, b)) for a, b in pairs)
            relative = largest / mine.fingerprint.largest if mine.fingerprint.largest else math.inf
            return Difference(mine, relative if largest else 0.0, True, types=types)
        if counts[0]:
            return Difference(mine, math.inf, False, f"has other bits, and {counts[0]:,} elements that are inf or nan")
        return Difference(mine, mine.fingerprint.relative_difference(its.fingerprint), False, types=types)


def _elements(folder: Path, entry: RecordedTensor) -> Tensor:
    path, dtype = folder / entry.tensor, getattr(torch, entry.dtype)
    if path.stat().st_size != entry.count * dtype.itemsize:
        raise RunError(f"{path} has {path.stat().st_size:,} bytes, and not {entry.count:,} elements of {entry.dtype}")
    return torch.from_file(str(path), shared=False, size=entry.count, dtype=dtype)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a.to(wide) - b.to(wide)).abs().masked_fill(same, 0.0).nan_to_num(math.inf).max())


@dataclass(frozen=True)
class _Run:
    """A recorded run: each rank's entries, the last of a key where a run was resumed."""

    folder: Path
    by_rank: Mapping[int, Mapping[tuple[Key, int, int], RecordedTensor]]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        files = sorted(folder.glob("rank*.jsonl"))
        if not files:
            raise RunError(f"{folder} has no recorded values; record_values(folder) of forward_backward writes them")
        return cls(folder, {int(file.stem[4:]): cls._entries(file) for file in files})

    @staticmethod
    def _entries(file: Path) -> dict[tuple[Key, int, int], RecordedTensor]:
        """The entries of a rank's file. A run that begins again, or goes on from a checkpoint, makes steps anew."""
        entries, last = dict[tuple[Key, int, int], RecordedTensor](), -1
        for entry in entries_of(file):
            if entry.step < last:
                entries = {key: each for key, each in entries.items() if each.step <= entry.step}
            entries[_key(entry), entry.start, entry.count] = entry
            last = entry.step
        return entries

    @property
    def is_plain(self) -> bool:
        """Whether the run is of plain PyTorch, in which values have no names but their boundaries."""
        values = [entry for part in self.by_rank.values() for entry in part.values() if entry.kind == VALUE]
        return bool(values) and all(entry.name == entry.boundary for entry in values)

    def tensors(self, by_boundary: bool) -> dict[Key, _Whole]:
        """The run's tensors, in the order of the steps."""
        parts: dict[Key, dict[tuple[int, int], RecordedTensor]] = {}
        for entries in self.by_rank.values():
            for entry in entries.values():
                parts.setdefault(_key(entry, by_boundary), {}).setdefault((entry.start, entry.count), entry)
        wholes = {key: self._whole([entry for _, entry in sorted(each.items())]) for key, each in parts.items()}
        return dict(sorted(wholes.items(), key=lambda item: _order(item[1].entry)))

    def _whole(self, parts: Sequence[RecordedTensor]) -> _Whole:
        numel = math.prod(parts[0].shape)
        parts = [part for part in parts if part.count == numel][:1] or parts
        if sum(part.count for part in parts) != numel:
            raise RunError(
                f"{self.folder} has {sum(part.count for part in parts):,} of the {numel:,} elements of the "
                f"{parts[0].kind} {parts[0].name} in step {parts[0].step}: the file of a rank is missing"
            )
        fingerprint = reduce(add, (part.fingerprint for part in parts[1:]), parts[0].fingerprint)
        return _Whole(self.folder, replace(parts[0], fingerprint=fingerprint), tuple(parts))

    def copies_that_differ(self) -> Iterator[Difference]:
        """Yields the tensors of which two ranks of this run have different copies."""
        first: dict[tuple[Key, int, int], tuple[int, RecordedTensor]] = {}
        for rank, entries in self.by_rank.items():
            for key, entry in entries.items():
                owner, copied = first.setdefault(key, (rank, entry))
                if copied.fingerprint.bits != entry.fingerprint.bits:
                    relative = copied.fingerprint.relative_difference(entry.fingerprint)
                    ranks = f"ranks {owner} and {rank} of {self.folder}"
                    text = f"is not the same on {ranks}: it differs by about {relative:.1g} of its norm"
                    yield Difference(entry, relative, False, text)


def _key(entry: RecordedTensor, by_boundary: bool = False) -> Key:
    name = entry.name + f" ({entry.what})" * bool(entry.what)
    return entry.step, entry.microbatch, entry.kind, entry.boundary if by_boundary and entry.boundary else name
