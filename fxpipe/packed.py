"""Packed: rules that split an input whose rows do not correspond to the batch's rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxpipe.errors import RunError, nearest
from fxpipe.validation import Expected, check, is_mapping, is_text, is_whole, or_none, shown


@dataclass(frozen=True)
class Packed:
    """An input with a varying number of rows, or of list entries, per row of the batch, in the order of these rows.

    >>> import fxpipe
    >>> batch_dim = {
    ...     "pixel_values": fxpipe.Packed(lambda image_grid_thw: image_grid_thw.prod(1), of="image_grid_thw"),
    ...     "image_grid_thw": fxpipe.Packed(lambda input_ids: (input_ids == 7).sum(1)),  # 7: where an image begins
    ...     "images": fxpipe.Packed(1),  # a list with an entry for each row
    ... }

    A tensor is split along ``dim``; a list or tuple into lists or tuples of its entries of any type, such as objects or
    tensors of different shapes. A micro-batch without rows gets an empty tensor, or an empty list.
    Weights of micro-batches still count the batch's rows.

    Args:
        counts: the number of rows or entries per row. A whole number holds for all rows. A name is the name of a
            1-dimensional input that holds the numbers, or of an input with ``Offsets``. A function, whose parameters
            are names of inputs, returns the numbers as a 1-dimensional tensor of integers or a list of whole numbers.
            The numbers must sum to the size of ``dim``, or to the length of the list. Counts on a GPU make the host
            wait.
        of: a packed input whose rows the counts are for; None: the batch's rows.
        dim: the dimension of a tensor that is split.

    Raises:
        RunError: ``counts`` has none of these types; in calls, on all ranks: values are no counts, their number is not
            the number of rows, or their sum is not the size.
    """

    counts: int | str | Callable[..., Any]
    of: str | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        check(RunError, _KINDS, counts=self.counts, of=self.of, dim=self.dim)
        if is_whole(self.counts):
            object.__setattr__(self, "counts", int(self.counts))  # type: ignore[arg-type]
        if isinstance(self.counts, int) and self.counts < 1:
            raise RunError(f"counts is {self.counts}; each row has at least 1, or other numbers: write a function")
        read_by(self)


@dataclass(frozen=True)
class Offsets:
    """An input that holds the start of each packed sequence, and the end of the last sequence.

    >>> import fxpipe
    >>> batch_dim = {
    ...     "cu_seqlens": fxpipe.Offsets(),
    ...     "input_ids": fxpipe.Packed("cu_seqlens", dim=1),  # (1, tokens)
    ... }

    The input is a 1-dimensional tensor of (sequences + 1) integers that begins with 0 and never decreases; so does the
    tensor of each micro-batch. The sequences are the rows of the batch, or ``of`` another packed input.
    """

    of: str | None = None

    def __post_init__(self) -> None:
        check(RunError, _KINDS, of=self.of)


Rule = int | Packed | Offsets | Mapping[str, Any] | None
BatchDim = int | Mapping[str, Rule]

_KINDS = {
    "counts": Expected(
        lambda value: is_whole(value) or is_text(value) or callable(value),
        "a whole number, the name of an input, or a function of inputs",
    ),
    "of": Expected(or_none(is_text), "the name of a packed input"),
    "dim": Expected(is_whole, "a dimension"),
}


def read_by(rule: Packed) -> dict[str, bool]:
    """Input that counts are read from → whether it is required: True without a default."""
    if is_text(rule.counts):
        return {str(rule.counts): True}
    if not callable(rule.counts):
        return {}
    try:
        parameters = list(inspect.signature(rule.counts).parameters.values())
    except ValueError:  # such as a function in C
        parameters = []
    if not parameters or any(each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) for each in parameters):
        raise RunError(
            f"counts is {shown(rule.counts)}, whose parameters are no names of inputs; write a function such as "
            "lambda input_ids: (input_ids == START).sum(1)"
        )
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}


def written(path: str, rule: str) -> str:
    """The text ``batch_dim={...}`` of a rule for an input, or for a value in a dict input."""
    for name in reversed(path.split(".")):
        rule = f"{{{name!r}: {rule}}}"
    return f"batch_dim={rule}"


def is_batch_dim(value: Any) -> bool:
    """Whether a value is valid as ``batch_dim``."""
    return is_whole(value) or (is_mapping(value) and all(map(_is_rule, value.values())))


def _is_rule(value: Any) -> bool:
    return value is None or isinstance(value, Packed | Offsets) or is_batch_dim(value)


def counted(batch_dim: BatchDim) -> dict[str, Packed | Offsets]:
    """The inputs that are split by counts, by path: "images", or "batch.images" inside a dict input.

    An input comes after the input whose rows its counts are for. RunError if no such order exists.
    """
    rules = dict(_under("", batch_dim)) if is_mapping(batch_dim) else {}
    # An input whose counts are for the rows of another packed input needs that input's counts first: each pass takes
    # the inputs that are ready, until all are taken, or no further input is ready.
    ordered: dict[str, Packed | Offsets] = {}
    while len(ordered) < len(rules):
        ready = {path: rule for path, rule in rules.items() if rule.of not in rules or rule.of in ordered}
        if len(ready) == len(ordered):
            circle = ", ".join(f"{path!r} of {rule.of!r}" for path, rule in rules.items() if path not in ordered)
            raise RunError(f"batch_dim counts rows in a circle: {circle}; leave of= out where rows are the batch's")
        ordered |= ready
    return ordered


def _under(prefix: str, rules: Any) -> Iterator[tuple[str, Packed | Offsets]]:
    for name, rule in rules.items():
        if isinstance(rule, Packed | Offsets):
            yield f"{prefix}{name}", rule
        elif is_mapping(rule):
            yield from _under(f"{prefix}{name}.", rule)


def rule_at(batch_dim: BatchDim, path: str) -> Rule:
    """The rule of an input, or of a value in a dict input; an unnamed input has its rows in dimension 0."""
    rule: Rule = batch_dim
    for name in path.split("."):
        rule = rule.get(name, 0) if isinstance(rule, Mapping) else rule
    return int(rule) if is_whole(rule) else rule  # type: ignore[arg-type]


def check_counted(batch_dim: BatchDim) -> None:
    """Raises RunError if an ``of`` names an input that is not split into rows."""
    for path, rule in counted(batch_dim).items():
        if rule.of is not None and not isinstance(rule_at(batch_dim, rule.of), int | Packed | Offsets):
            raise RunError(f"{path!r} is counted of={rule.of!r}, which is not cut into rows; name a packed input")


def check_names(batch_dim: BatchDim, names: Collection[str]) -> None:
    """Raises RunError for a name that is no input's name."""
    named = dict.fromkeys(batch_dim if isinstance(batch_dim, Mapping) else (), "batch_dim")
    for path, rule in counted(batch_dim).items():
        read = [name for name, needed in read_by(rule).items() if needed] if isinstance(rule, Packed) else []
        for other in (*read, *([] if rule.of is None else [rule.of])):
            named.setdefault(other.split(".")[0], f"batch_dim, in what counts {path!r},")
    for name, text in named.items():
        if name not in names:
            raise RunError(f"{text} names {name!r}, which is no input{nearest(name, names)}")


def read_for(names: Collection[str], batch_dim: BatchDim, available: Collection[str]) -> set[str]:
    """The inputs that are needed to split ``names``: these give their counts, if required or ``available``."""
    # From the last rule to the first: an input that a later rule needs may itself need others.
    rules, paths = counted(batch_dim), set[str]()
    for path, rule in reversed(rules.items()):  # dependents before the inputs that they need
        if path.split(".")[0] in names or path in paths:
            read = read_by(rule) if isinstance(rule, Packed) else {}
            paths |= {name for name, needed in read.items() if needed or name in available}
            paths |= set() if rule.of is None else {rule.of}
    return {path.split(".")[0] for path in paths}
