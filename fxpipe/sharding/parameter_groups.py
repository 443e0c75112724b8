"""Parameter groups: an optimizer's parameter groups, out of parameters, names, patterns and predicates."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import RunError, nearest, noted
from fxpipe.validation import shown


def resolve_groups(params: Any, held: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Parameter groups as torch's optimizers take them, of what this rank holds out of ``params``.

    ``params`` is None (all), or parameters, or groups ``{"params": parameters, "lr": ...}``. Parameters may be given
    as such, as (name, parameter), by name (a tied one by any of its names), by a pattern (``"*.bias"``), or by a
    predicate ``(name, parameter) -> bool``. ``held``: this rank's parameters under all their names; ``whole``: the
    whole model's, on the meta device where others hold them. A predicate sees both, so it may ask for the shape and
    the type of a parameter, not for its values.

    There are as many groups on each rank, some of them empty: ``{"params": []}``. Every group holds its parameters in
    the order given or, under a pattern or predicate, in the model's. Parameters outside of the model pass through.

    Raises:
        RunError: a name, pattern or predicate fits nothing in the whole model; or what torch's optimizers refuse, a
            parameter in two groups above all.
    """
    if isinstance(params, (Tensor, nn.Module)):
        raise RunError(f"params is a {type(params).__name__}; write a list of parameters, or of groups of them")
    entries = list(held) if params is None else _listed(params)
    groups: list[Any] = entries if any(isinstance(one, Mapping) for one in entries) else [{"params": entries}]
    names, has_names = _Names(held, whole), bool(groups)
    resolved: list[dict[str, Any]] = []
    home: dict[str | int, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise RunError(f"parameter group {number} is {shown(group)}, and no dict; write {_GROUP}")
        if "params" not in group:
            raise RunError(f"parameter group {number} has {shown(list(group))}, and no 'params'; write {_GROUP}")
        entries = _listed(group["params"])
        has_names = has_names and all(map(_is_pair, entries))
        mine: dict[int, Tensor] = {}
        for name, tensor in (one for entry in entries for one in names.meant_by(entry, number)):
            if home.setdefault(name or id(tensor), number) != number:
                raise RunError(
                    f"some parameters appear in more than one parameter group: {name or 'one without a name'} "
                    f"is in groups {home[name or id(tensor)]} and {number}"
                )
            here = names.held.get(name) if name else tensor
            if here is not None:
                mine[id(here)] = here
        resolved.append({**group, "params": list(mine.values())})
    for group in resolved if has_names else ():  # as torch keeps them
        group["params"] = [(names.of.get(id(parameter), ""), parameter) for parameter in group["params"]]
    return resolved


_GROUP = '{"params": "*.bias", "lr": 0.1}'


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def first_names(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name → the first name of the same parameter, as ``named_parameters()`` has it."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}


def whole_groups(everyone: Sequence[Any], order: Sequence[str], who: Callable[[int], str]) -> list[tuple[str, ...]]:
    """The names of each group out of all pipe ranks' parts of it, in the model's order. ``who``: a pipe rank in words.

    Raises:
        RunError: a rank has no groups, but what is wrong with them; or as many groups as rank 0.
    """
    for rank, sent in enumerate(everyone):
        if isinstance(sent, str):
            raise RunError(f"{who(rank)} could not make the optimizer: {sent}")
        if len(sent) != len(everyone[0]):
            raise RunError(
                f"{who(0)} and {who(rank)} have made parameter groups of their own, {len(everyone[0])} and "
                f"{len(sent)}; groups are the whole model's: name their parameters on all ranks, {_GROUP}"
            )
    place = {name: number for number, name in enumerate(order)}
    return [tuple(sorted(set().union(*parts), key=place.__getitem__)) for parts in zip(*everyone, strict=True)]


def _listed(params: Any) -> list[Any]:
    """A group's parameters, one or several of them, as a list."""
    if isinstance(params, set | frozenset):
        raise RunError("parameters come in a set, whose order changes between runs; write a list")
    if isinstance(params, (str, Tensor, Mapping)) or callable(params):
        return [params]
    if not isinstance(params, Iterable):
        raise RunError(f"params is {shown(params)}; write parameters, names, patterns or predicates, or groups of them")
    return list(params)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], Tensor)


class _Names:
    """The parameters of the whole model by name. ``held``: those of this rank, by their first names; ``of``: that
    name by identity."""

    def __init__(self, held: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        self._whole = {**whole, **held}
        self._first = first_names({**held, **whole})
        self.of = {id(t): self._first[name] for each in (held, whole) for name, t in each.items()}
        self.held = {self._first[name]: tensor for name, tensor in held.items()}

    def meant_by(self, entry: Any, group: int) -> list[tuple[str, Tensor]]:
        """First name and parameter of what an entry of a group means; of a tensor from elsewhere the name is empty."""
        if _is_pair(entry):
            entry = entry[1]
        if isinstance(entry, Tensor):
            return [(self.of.get(id(entry), ""), entry)]
        if isinstance(entry, str):
            asked, wrong = repr(entry), "which fits no parameter of the model"
            names = [name for name in self._whole if fnmatch.fnmatchcase(name, entry)]
            close = [] if names else difflib.get_close_matches(entry, list(self._whole), n=5, cutoff=0.0)
            wrong += nearest(entry, close)
        elif callable(entry):
            asked = f"{getattr(entry, '__qualname__', repr(entry))}(name, parameter)"
            wrong = "which is true for no parameter of the model"
            with noted(lambda: f"in a predicate (name, parameter) of parameter group {group}"):
                names = [name for name, tensor in self._whole.items() if entry(name, tensor)]
        else:
            raise RunError(
                f"parameter group {group} holds {shown(entry)}; write parameters, names, patterns or predicates"
            )
        if not names:
            raise RunError(f"parameter group {group} asks for {asked}, {wrong}")
        return [(self._first[name], self._whole[name]) for name in names]
