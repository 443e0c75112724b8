"""Recording: writes the fingerprints of a run's values, gradients and parameters, one file a rank."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from fxpipe.device import to_host
from fxpipe.errors import RunError
from fxpipe.numerics.fingerprint import NOTHING, Fingerprint, measure, positions_of
from fxpipe.tensors.dtensors import local
from fxpipe.torch_compat.tensors import tensors_in

INPUT, VALUE, LOSS, GRADIENT = "input", "value", "loss", "gradient"
PARAMETER_GRADIENT, PARAMETER = "parameter's gradient", "parameter"
MOST_OUTPUTS = 1 << 16
"""The factor of a stage's number in the order of values: more than a stage has outputs."""
_OPEN = set[Path]()
"""The files that recorders of this process have open."""


class TensorPart(NamedTuple):
    """This rank's part of a parameter or gradient. ``order``: the parameter's number in the model. ``positions``: the
    elements' positions in the whole tensor; None: the part is the whole."""

    name: str
    order: int
    tensor: Tensor
    shape: Sequence[int]
    positions: Tensor | None


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor of a run, or one rank's part of the tensor."""

    step: int
    kind: str
    name: str
    """The input's or parameter's name, or the value's name in the captured program."""
    microbatch: int
    """The number over all replicas. A group has the number of its first micro-batch, a parameter has -1."""
    order: int
    """The tensor's index among the tensors of its kind and micro-batch; stages count in topological order."""
    boundary: str
    """For a value that crosses a mark: ``boundary_label``."""
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    count: int
    """The number of elements in this part."""
    start: int = 0
    """The position of the part's first element in the whole tensor."""
    fingerprint: Fingerprint = NOTHING
    tensor: str = ""
    """The file with the part's elements, if they were recorded in full."""
    what: str = ""
    """A captured value in words: names alone are other values in a program that another tracer captured."""


class _Measured(NamedTuple):
    """An entry, and its numbers on the device: the start before the fingerprint's numbers."""

    entry: RecordedTensor
    numbers: Tensor
    bits: Tensor
    values: Tensor | None


class ValueRecorder:
    """Measures tensors on their devices during a step, and appends a line for each to the file of this rank.

    ``rank``: this rank's number among ``ranks``. ``replica``: its number along the data axis. ``full``: whether the
    tensors are written, too.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, ranks: int, replica: int, full: bool) -> None:
        self._folder, self._rank, self._replica, self._full = Path(folder), rank, replica, full
        self._measured: list[_Measured] = []
        self.step, self._microbatches = -1, 1
        """The number of the step that is recorded, from 0; -1 before the first."""
        self.has_parameters = False
        """Whether the parameters after the step are recorded."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if file_of(self._folder, ranks).exists():
                raise RunError(f"{folder} has the values of a run on more ranks; give each run a folder of its own")
            self._path = file_of(self._folder, rank).resolve()
            if self._path in _OPEN:
                raise RunError(f"{folder} is being recorded to already; give each model a folder of its own")
            self._file = self._path.open("a")
            if not _locks(self._file):
                raise RunError(f"{folder} is being recorded to by another process; record one, or give each a folder")
            _OPEN.add(self._path)
        except OSError as error:
            raise RunError(f"values cannot be recorded in {folder}: {error.strerror}") from None

    def begin(self, step: int, batches: Sequence[Mapping[str, Any]]) -> None:
        """Begins a step with this rank's inputs of each micro-batch."""
        self.step, self._microbatches, self.has_parameters = step, len(batches), False
        for microbatch, batch in enumerate(batches):
            self.add_inputs(microbatch, batch)

    def add_inputs(self, microbatch: int, batch: Mapping[str, Any]) -> None:
        """Measures the inputs of a micro-batch."""
        for order, (name, value) in enumerate(batch.items()):
            self.add(INPUT, name, microbatch, order, value)

    def drop(self, kind: str) -> None:
        """Drops the entries of a kind that are not written yet."""
        self._measured = [each for each in self._measured if each.entry.kind != kind]

    def add(
        self, kind: str, name: str, microbatch: int, order: int, value: Any, boundary: str = "", what: str = ""
    ) -> None:
        """Measures the tensors in ``value``."""
        number = self._replica * self._microbatches + microbatch
        leaves = tensors_in(value)
        for index, leaf in enumerate(leaves):
            leaf_name = name if len(leaves) == 1 else f"{name}[{index}]"
            part = TensorPart(leaf_name, order, leaf, leaf.shape, positions_of(leaf))
            self._add(kind, number, boundary, part, what)

    def add_parts(self, kind: str, parts: Iterable[TensorPart]) -> None:
        """Measures parameters, or their gradients."""
        self.has_parameters |= kind == PARAMETER
        for part in parts:
            self._add(kind, -1, "", part)

    def _add(self, kind: str, microbatch: int, boundary: str, part: TensorPart, what: str = "") -> None:
        elements = local(part.tensor.detach())
        if elements.layout is not torch.strided or elements.is_meta:
            return
        positions = None if part.positions is None else part.positions.reshape(-1)
        start = torch.zeros(1, dtype=torch.float64, device=elements.device)
        if positions is not None and positions.numel():
            start = positions[:1].double()
        numbers, bits = measure(elements, positions)
        dtype = str(elements.dtype).removeprefix("torch.")
        shape, count = tuple(part.shape), elements.numel()
        entry = RecordedTensor(
            self.step, kind, part.name, microbatch, part.order, boundary, dtype, shape, count, what=what
        )
        values = elements.clone() if self._full else None
        self._measured.append(_Measured(entry, torch.cat([start, numbers]), bits, values))

    def write(self) -> None:
        """Appends the measured entries to the file. Waits for the device."""
        measured, self._measured = self._measured, []
        arrived = to_host([each.numbers for each in measured] + [each.bits for each in measured])()
        for number, (entry, _, _, values) in enumerate(measured):
            start, *numbers = arrived[number].tolist()
            fingerprint, tensor = Fingerprint.from_numbers(numbers, int(arrived[len(measured) + number])), ""
            if values is not None and entry.count:
                tensor = f"rank{self._rank:05}-{self._file.tell():012}.bin"
                file = torch.from_file(str(self._folder / tensor), shared=True, size=entry.count, dtype=values.dtype)
                file.copy_(values.reshape(-1))
            entry = replace(entry, start=int(start), fingerprint=fingerprint, tensor=tensor)
            self._file.write(json.dumps(asdict(entry)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        _OPEN.discard(self._path)


def _locks(file: TextIO) -> bool:
    """Whether this process alone writes to the file, as far as the file system knows."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other error: the file system has no locks
        return not isinstance(error, (BlockingIOError, PermissionError))
    return True


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank's entries."""
    return folder / f"rank{rank:05}.jsonl"


def entries_of(path: Path) -> Iterator[RecordedTensor]:
    """Yields the entries of a rank's file; RunError if a line is no entry."""
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = RecordedTensor(**json.loads(line))
                bits, squares, largest, nonfinite, projections = entry.fingerprint
                fingerprint = Fingerprint(bits, squares, largest, nonfinite, tuple(projections))
                yield replace(entry, shape=tuple(entry.shape), fingerprint=fingerprint)
            except (ValueError, TypeError) as error:
                raise RunError(f"{path}, line {number}, is no recorded value ({error})") from None
