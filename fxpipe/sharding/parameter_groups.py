"""Parameter groups: makes an optimizer's parameter groups from parameters, names, patterns and predicates."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import RunError, nearest, noted
from fxpipe.validation import shown


def resolve_groups(params: Any, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Returns parameter groups in the form of torch's optimizers, with this rank's part of ``params``.

    ``params`` is None (all), or parameters, or groups ``{"params": parameters, "lr": ...}``. A parameter is passed
    itself, as (name, parameter), by name (a tied parameter by any of its names), by a pattern (``"*.bias"``), or by a
    predicate ``(name, parameter) -> bool``. ``own``: this rank's parameters under all their names; ``whole``: the whole
    model's parameters; other ranks' parameters are on the meta device. A predicate sees all of them, so it may read a
    parameter's shape and dtype, but not its values.

    All ranks have the same number of groups; a group without this rank's parameters is ``{"params": []}``. A group has
    the order in which its parameters are passed; for a pattern or predicate, the model's order. Parameters outside of
    the model pass through.

    Raises:
        RunError: a name, pattern or predicate fits no parameter of the whole model; or torch's optimizers refuse the
            groups, as for a parameter in two groups.
    """
    if isinstance(params, (Tensor, nn.Module)):
        raise RunError(f"params is a {type(params).__name__}; write a list of parameters, or of groups of them")
    entries = list(own) if params is None else _listed(params)
    groups: list[Any] = entries if any(isinstance(entry, Mapping) for entry in entries) else [{"params": entries}]
    names, has_names = _Names(own, whole), True
    resolved: list[dict[str, Any]] = []
    home: dict[str | int, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise RunError(f"parameter group {number} is {shown(group)}; write {_GROUP}")
        mine: dict[int, Tensor] = {}
        entries = _listed(group["params"])
        has_names = has_names and bool(entries) and all(isinstance(entry, tuple) for entry in entries)
        asker = f"parameter group {number}"
        for name, tensor in (named for entry in entries for named in names.meant_by(entry, asker)):
            # A parameter of another rank has a name on this rank, but no tensor to step.
            if home.setdefault(name or id(tensor), number) != number:
                raise RunError(
                    f"some parameters appear in more than one parameter group: {name or 'one without a name'} "
                    f"is in groups {home[name or id(tensor)]} and {number}"
                )
            here = names.own.get(name) if name else tensor
            if here is not None:
                mine[id(here)] = here
        resolved.append({**group, "params": list(mine.values())})
    for group in resolved if has_names else ():  # as torch keeps the names of pairs
        group["param_names"] = [names.of.get(id(parameter), "") for parameter in group["params"]]
    return resolved


_GROUP = '{"params": "*.bias", "lr": 0.1}'


def names_of(params: Any, whole: Mapping[str, Tensor], asker: str, tensors: bool) -> list[str]:
    """Returns the first names of the selected parameters, in the model's order: see ``resolve_groups``. None: all.

    RunError if a name, pattern or predicate fits no parameter of the whole model, or a parameter is not in the model;
    or if ``params`` has tensors, and ``tensors`` is False.
    """
    names, first = _Names({}, whole), dict.fromkeys(first_names(whole).values())
    entries = list(first) if params is None else _listed(params)
    if not tensors and any(isinstance(entry, Tensor | tuple) for entry in entries):
        raise RunError(f"{asker} holds parameters, which only some ranks have; write names, patterns or predicates")
    meant = {name for entry in entries for name, _ in names.meant_by(entry, asker)}
    if "" in meant:
        raise RunError(f"{asker} holds a parameter that is none of the model's")
    return [name for name in first if name in meant]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's hyperparameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def first_names(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns each name → the first name of the same parameter, which ``named_parameters()`` gives."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}


def whole_groups(everyone: Sequence[Any], order: Sequence[str], who: Callable[[int], str]) -> list[tuple[str, ...]]:
    """Merges all pipe ranks' parts to the names of each group, in the model's order. ``who``: names a pipe rank.

    Raises:
        RunError: a rank could not make its groups, and has sent its error; or has another number of groups than rank 0.
    """
    # Each rank sends the names in its groups, or its error as text, so that all ranks raise together.
    for rank, sent in enumerate(everyone):
        if isinstance(sent, str):
            raise RunError(f"{who(rank)} could not make the optimizer: {sent}")
        if len(sent) != len(everyone[0]):
            raise RunError(
                f"{who(0)} and {who(rank)} have made parameter groups of their own, {len(everyone[0])} and "
                f"{len(sent)}; groups are the whole model's: name their parameters on all ranks, {_GROUP}"
            )
    position = {name: number for number, name in enumerate(order)}
    return [tuple(sorted(set().union(*parts), key=position.__getitem__)) for parts in zip(*everyone, strict=True)]


def _listed(params: Any) -> list[Any]:
    """Returns a group's parameters, a single entry or several, as a list."""
    if isinstance(params, set | frozenset):
        raise RunError("parameters come in a set, whose order changes between runs; write a list")
    if isinstance(params, (str, Tensor, Mapping)) or callable(params):
        return [params]
    if not isinstance(params, Iterable):
        raise RunError(f"params is {shown(params)}; write parameters, names, patterns or predicates, or groups of them")
    return list(params)


class _Names:
    """The whole model's parameters. ``own``: first name → this rank's parameter; ``of``: id → first name."""

    def __init__(self, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        self._whole, self._first = whole, first_names(whole)
        self.of = {id(tensor): self._first[name] for name, tensor in whole.items()}
        self.own = {self._first[name]: tensor for name, tensor in own.items()}

    def meant_by(self, entry: Any, asker: str) -> list[tuple[str, Tensor]]:
        """Returns (first name, parameter) of the parameters that an entry of ``asker`` selects; the name is "" for a
        tensor outside of the model."""
        match entry:
            case (str(), Tensor() as parameter):  # an entry of named_parameters()
                entry = parameter
        if isinstance(entry, Tensor):
            return [(self.of.get(id(entry), ""), entry)]
        if isinstance(entry, str):
            # A name is a pattern that fits itself. Every name of a tied parameter fits, whichever rank holds it.
            names = [name for name in self._whole if fnmatch.fnmatchcase(name, entry)]
        elif callable(entry):
            with noted(lambda: f"in a predicate (name, parameter) of {asker}"):
                names = [name for name, tensor in self._whole.items() if entry(name, tensor)]
        else:
            raise RunError(f"{asker} holds {shown(entry)}; write parameters, names, patterns or predicates")
        if not names:
            if isinstance(entry, str):
                close = difflib.get_close_matches(entry, list(self._whole), n=5, cutoff=0.0)
                request = f"{entry!r}, which fits no parameter of the model{nearest(entry, close)}"
            else:
                name = getattr(entry, "__qualname__", repr(entry))
                request = f"{name}(name, parameter), which is true for no parameter of the model"
            raise RunError(f"{asker} asks for {request}")
        return [(self._first[name], self._whole[name]) for name in names]
