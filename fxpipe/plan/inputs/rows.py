"""Rows: how many rows a batch has by its inputs, and each micro-batch's. Counts must fit what they count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from fxpipe.errors import RunError, nearest
from fxpipe.graph.like import TensorLike
from fxpipe.packed import BatchDim, Offsets, Packed, Rule, counted, read_by, rule_at, written
from fxpipe.plan.inputs.batch import Description
from fxpipe.plan.inputs.counts import Counts
from fxpipe.torch_compat import pytree
from fxpipe.validation import is_mapping, shown


class InputRows(NamedTuple):
    """An input, or a value in a dict input, whose values follow one rule. ``like``: with ``TensorLike`` for tensors."""

    rule: Rule
    shapes: Sequence[tuple[int, ...]]
    like: Any


def is_entries(value: Any) -> bool:
    """Whether a value is a list, or a tuple without names."""
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def entries_of(description: Description, batch_dim: BatchDim) -> dict[str, InputRows]:
    """By their paths, the inputs of a batch."""
    inputs = [(name, given.like) for name, given in description if given.kind == "input"]
    return {path: one for name, like in inputs for path, one in _within(name, like, rule_at(batch_dim, name))}


def _within(path: str, like: Any, rule: Rule) -> Iterator[tuple[str, InputRows]]:
    if not isinstance(rule, Mapping):
        shapes = [leaf.shape for leaf in pytree.tree_leaves(like) if isinstance(leaf, TensorLike)]
        yield path, InputRows(rule, shapes, like)
        return
    if not is_mapping(like):
        raise RunError(f"batch_dim names what is in input {path!r}, which is {shown(like)} and no dict")
    others = [name for name in like if name not in rule]
    for name in rule:
        if name not in like and (hint := nearest(name, others)).startswith("; did"):
            raise RunError(f"batch_dim names {name!r}, which is not in input {path!r}{hint}")
    for name, value in like.items():
        yield from _within(f"{path}.{name}", value, rule.get(name, 0)) if value is not None else ()


def row_count(description: Description, batch_dim: BatchDim, counts: Counts | None = None) -> int | None:
    """The number of rows of a batch; None where no input gives it. ``counts``: merged; None: they are not checked.

    ``description``: what ranks reported, without objects of this one's, so that all refuse the same.

    RunError where inputs disagree, or counts do not fit what they count.
    """
    # Every input that gives rows must give as many, and so must counts of the batch's rows.
    entries = entries_of(description, batch_dim)
    sizes = {path: _size(path, entry) for path, entry in entries.items()}
    by_input = {path: _rows(path, entries[path].rule, size) for path, size in sizes.items()}
    for path, rule in counted(batch_dim).items():
        if rule.of is None and path in (counts or {}):
            by_input[f"counts of {path}"] = len((counts or {})[path])
    rows = {name: number for name, number in by_input.items() if number is not None}
    _check_lists(entries, rows, batch_dim)
    if len(set(rows.values())) > 1:
        lengths = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise RunError(
            f"the inputs have different numbers of rows ({lengths}); what is not cut into micro-batches is named in "
            "batch_dim={'name': None}, and what has several rows for one of the batch's, or none, in "
            "batch_dim={'name': fxpipe.Packed(counts)}"
        )
    found = next(iter(rows.values()), None)
    if counts is not None:
        _check_counts(sizes, found, counts, batch_dim)
    return found


def _size(path: str, entry: InputRows) -> int | None:
    """How long an input is where it is cut; None for what is not split."""
    rule = entry.rule
    if rule is None or isinstance(rule, Mapping):
        return None
    if isinstance(rule, Packed) and is_entries(entry.like):
        return len(entry.like)
    if isinstance(rule, Packed) and any(_lists(path, entry.like)):
        place, _ = next(_lists(path, entry.like))
        raise RunError(f"input {path!r} has a list in a dict; name the list, {written(place, 'fxpipe.Packed(...)')}")
    along = rule.dim if isinstance(rule, Packed) else 0 if isinstance(rule, Offsets) else rule
    shapes = [shape for shape in entry.shapes if shape]
    for shape in shapes:
        if not -len(shape) <= along < len(shape):
            raise RunError(f"input {path!r} of shape {list(shape)} has no dimension {along}; see batch_dim=")
    found = {shape[along] for shape in shapes}
    if len(found) > 1:
        one, other, *_ = sorted(found)
        raise RunError(
            f"input {path!r} holds tensors of {one} and of {other} rows; where it is a list with an entry for each "
            f"row, write {written(path, 'fxpipe.Packed(1)')}"
        )
    if not found and isinstance(rule, Packed | Offsets):
        raise RunError(f"input {path!r} is named in batch_dim as packed, and holds no tensor with rows to be counted")
    return next(iter(found), None)


def _rows(path: str, rule: Rule, size: int | None) -> int | None:
    """How many rows the batch has by an input of that size; None where it does not give it."""
    if isinstance(rule, Packed | Offsets) and rule.of is not None:
        return None
    if size is None or isinstance(rule, Offsets):
        return size and size - 1
    if not isinstance(rule, Packed):
        return size
    if not isinstance(rule.counts, int):
        return None
    if size % rule.counts:
        raise RunError(f"input {path!r} has {size} rows, which are not {rule.counts} for each row of a batch")
    return size // rule.counts


def _check_lists(entries: Mapping[str, InputRows], rows: Mapping[str, int], batch_dim: BatchDim) -> None:
    """RunError for a list that may have an entry for each row, where nobody has said whether it has."""
    # A list of images, 3 × height × width, looks like a list of tensors with 3 rows each: torchvision's detectors take
    # the former, and a DataLoader's batch is the latter.
    unnamed = [path for path in rows if path in entries and not _is_named(path, batch_dim)]
    lists = {path: list(_lists(path, entries[path].like)) for path in unnamed}
    is_alone = all(map(lists.get, rows))
    for path in unnamed:
        for place, listed in lists[path]:
            if _may_be_rows(listed, rows[path], is_alone):
                raise RunError(
                    f"input {place!r} is a list of {len(listed)}, and it is not clear where it has the batch's rows: "
                    f"write {written(place, 'fxpipe.Packed(1)')} where it has an entry for each row, or "
                    f"{written(place, '0')} where each of its tensors has all rows in dimension 0"
                )


def whole_lists(description: Description, batch_dim: BatchDim, rows: int) -> list[str]:
    """The lists, without tensors, that have as many entries as the batch has rows, where nobody has said what for.

    As a ``DataLoader`` makes them of strings, which it puts into tuples. A tuple of numbers is a shape, or a mean.
    """
    return [
        path
        for name, one in entries_of(description, batch_dim).items()
        for path, listed in _sequences(name, one.like)
        if len(listed) == rows
        and (isinstance(listed, list) or isinstance(listed[0], str))
        and not _is_named(path, batch_dim)
        and not any(isinstance(leaf, TensorLike) for leaf in pytree.tree_leaves(listed))
    ]


def _is_named(path: str, batch_dim: BatchDim) -> bool:
    rule: Any = batch_dim
    for name in path.split("."):
        if not isinstance(rule, Mapping) or name not in rule:
            return False
        rule = rule[name]
    return True


def _sequences(path: str, like: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """The lists, and tuples without names, that an input is or has in a dict."""
    if is_mapping(like):
        for name, value in like.items():
            yield from _sequences(f"{path}.{name}", value)
    elif is_entries(like) and like:
        yield path, like


def _lists(path: str, like: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """Those of tensors, or of dicts."""
    for place, listed in _sequences(path, like):
        if all(isinstance(one, TensorLike) or is_mapping(one) for one in listed):
            yield place, listed


def _may_be_rows(listed: Sequence[Any], rows: int, is_alone: bool) -> bool:
    """Dicts are. Tensors may be if there are as many as rows, or if they are images, and the only inputs with rows."""
    if any(map(is_mapping, listed)):
        return True
    dims = {len(one.shape) for one in listed}
    if len(dims) > 1 or min(dims) < 2 or len({one.dtype for one in listed}) > 1:
        return False
    return len(listed) == rows or (is_alone and dims == {3})


def _check_counts(sizes: Mapping[str, int | None], rows: int | None, counts: Counts, batch_dim: BatchDim) -> None:
    """RunError where counts are not one for each row, or do not sum to what they count."""
    # Rows come first, then what is packed for rows of the batch, then what is packed for rows of that, as counted() has
    # them in order.
    rules = counted(batch_dim)
    for path, rule in rules.items():
        size = sizes.get(path)
        if size is None:  # not in this batch
            continue
        of = rule.of if rule.of in rules else None
        owner, wanted = ("the batch", rows) if of is None else (repr(of), sizes.get(of))
        if wanted is None:
            raise RunError(f"input {path!r} is counted for the rows of {owner}, which no rank was given")
        # n + 1 offsets have n sequences, which are the rows that are counted for.
        wanted -= of is not None and isinstance(rules[of], Offsets)
        numbers = _numbers_of(path, rule, wanted, counts)
        wanted_for = f"for the {wanted} rows of {owner}"
        if len(numbers) != wanted:
            hint = "" if rule.of is not None else "; where they are for the rows of another packed input, write of="
            raise RunError(f"the counts of {path!r} are {len(numbers)} numbers {wanted_for}{hint}")
        if isinstance(rule, Packed) and sum(numbers) != size:
            raise RunError(
                f"the counts of {path!r} sum to {sum(numbers)} {wanted_for}, and it has {size} rows; they are "
                f"{shown(list(numbers))}"
            )


def _numbers_of(path: str, rule: Packed | Offsets, rows: int, counts: Counts) -> Sequence[int]:
    if isinstance(rule, Packed) and isinstance(rule.counts, int):
        return (rule.counts,) * rows
    if path in counts:
        return counts[path]
    read = ", ".join(read_by(rule)) if isinstance(rule, Packed) else path
    raise RunError(
        f"input {path!r} is cut by counts that are read from {read}, and no rank was given all of it; give it to the "
        f"ranks that are given {path!r}"
    )


# --- and how it is cut


def split_rows(rows: int | None, microbatches: int) -> tuple[int, ...]:
    """Rows of each micro-batch, as ``torch.tensor_split`` cuts them; 1 each where nothing is cut."""
    if rows is None:
        return (1,) * microbatches
    if rows < microbatches:
        raise RunError(
            f"a batch of {rows} rows cannot be cut into {microbatches} micro-batches; "
            f"pass at least {microbatches} rows, or compile with microbatches={max(rows, 1)}"
        )
    return tuple(rows // microbatches + (place < rows % microbatches) for place in range(microbatches))


def pieces_of(batch_dim: BatchDim, sizes: Sequence[int], counts: Counts) -> dict[str, tuple[int, ...]]:
    """Path → how much of a counted input each micro-batch has, whose rows are ``sizes``. Of offsets: of sequences."""
    found: dict[str, tuple[int, ...]] = {}
    rules = counted(batch_dim)
    for path, rule in rules.items():
        base = found.get(rule.of) if rule.of in rules else tuple(sizes)
        if base is None:
            continue  # and this one was not given
        if isinstance(rule, Offsets):
            found[path] = base
        elif isinstance(rule.counts, int):
            found[path] = tuple(rule.counts * size for size in base)
        elif path in counts:
            # A micro-batch takes the counts of its own rows, which lie one after another.
            ends = [0, *accumulate(base)]
            found[path] = tuple(sum(counts[path][start:end]) for start, end in pairwise(ends))
    return found
