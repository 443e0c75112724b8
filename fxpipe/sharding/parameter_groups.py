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
    index = ParameterIndex(held, whole)
    resolved: list[dict[str, Any]] = []
    home: dict[str | int, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise RunError(f"parameter group {number} is {shown(group)}, and no dict; write {_GROUP}")
        if "params" not in group:
            raise RunError(f"parameter group {number} has {shown(list(group))}, and no 'params'; write {_GROUP}")
        listed = index.find(group["params"], number)
        found = {id(tensor) if name is None else name: (name, tensor) for name, tensor in listed}
        for identity, (name, _) in found.items():
            if home.setdefault(identity, number) != number:
                raise RunError(
                    f"some parameters appear in more than one parameter group: {name or 'one without a name'} "
                    f"is in groups {home[identity]} and {number}"
                )
        mine = {id(here): here for name, tensor in found.values() if (here := index.here(name, tensor)) is not None}
        resolved.append({**group, "params": list(mine.values())})
    if groups and all(_is_pair(entry) for group in groups for entry in _listed(group["params"])):
        for group in resolved:  # with names, as torch keeps them
            group["params"] = [(index.name_of(parameter), parameter) for parameter in group["params"]]
    return resolved


_GROUP = '{"params": "*.bias", "lr": 0.1}'


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def first_names(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name → the first name of the same parameter, as ``named_parameters()`` has it."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}


def comparable(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group's hyperparameters is equal on another rank, if it is; as plain data."""
    given = options_of(group).items()
    return {key: _plain(value) for key, value in given if isinstance(value, int | float | str | tuple | list | Tensor)}


def _plain(value: Any) -> Any:
    """A number of NumPy's as Python's own, equal to it; what is neither number, text nor list as its class's name."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value)) if type(value) in (tuple, list) else tuple(map(_plain, value))
    kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return kind(value) if kind is not None else type(value).__name__


def whole_groups(everyone: Sequence[Any], order: Sequence[str], who: Callable[[int], str]) -> list[tuple[str, ...]]:
    """The names of each group out of all pipe ranks' parts of it, in the model's order. ``who``: a pipe rank in words.

    Raises:
        RunError: a rank has no groups, but what is wrong with them; or other groups than rank 0.
    """
    wrong = next(((rank, sent) for rank, sent in enumerate(everyone) if isinstance(sent, str)), None)
    if wrong is not None:
        raise RunError(f"{who(wrong[0])} could not make the optimizer: {wrong[1]}")
    first = [options for _, options in everyone[0]]
    for rank, sent in enumerate(everyone):
        options = [options for _, options in sent]
        if options != first:
            raise RunError(
                f"{who(0)} and {who(rank)} have made parameter groups of their own, {first} and "
                f"{options}; groups are "
                'the whole model\'s: name their parameters on all ranks, {"params": "*.bias", ...}'
            )
    place = {name: number for number, name in enumerate(order)}
    named = [{name for sent in everyone for name in sent[number][0]} for number in range(len(first))]
    return [tuple(sorted(names, key=place.__getitem__)) for names in named]


def check_replicas(everyone: Sequence[Any]) -> None:
    """RunError, on all, where replicas of a stage make their optimizer with other groups or options."""
    other = next((replica for replica, sent in enumerate(everyone) if sent != everyone[0]), None)
    if other is not None:
        raise RunError(
            f"replicas 0 and {other} would make optimizers of their own, {everyone[0]} and {everyone[other]}, and "
            "their parameters would drift apart; give all ranks the same class and options"
        )


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


class ParameterIndex:
    """Who is who in the whole model: its parameters, by names and by identity."""

    def __init__(self, held: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        self._whole = {**whole, **held}
        self._canonical = first_names({**held, **whole})
        self._names = {id(t): self._canonical[name] for each in (held, whole) for name, t in each.items()}
        self._here = {self._canonical[name]: tensor for name, tensor in held.items()}

    def find(self, params: Any, group: int) -> list[tuple[str | None, Tensor]]:
        """What a group's entries mean: name and parameter, over the whole model."""
        found: list[tuple[str | None, Tensor]] = []
        for given in _listed(params):
            entry = given[1] if _is_pair(given) else given
            if isinstance(entry, str):
                names: Sequence[str] = [name for name in self._whole if fnmatch.fnmatchcase(name, entry)]
                if not names:
                    close = difflib.get_close_matches(entry, list(self._whole), n=5, cutoff=0.0)
                    raise RunError(
                        f"parameter group {group} asks for {entry!r}, which fits no parameter of the model"
                        f"{nearest(entry, close)}"
                    )
            elif isinstance(entry, Tensor):
                found.append((self._names.get(id(entry)), entry))
                continue
            elif callable(entry):
                called = getattr(entry, "__qualname__", repr(entry))
                with noted(lambda: f"in a predicate (name, parameter) of parameter group {group}"):
                    names = [name for name, tensor in self._whole.items() if entry(name, tensor)]
                if not names:
                    raise RunError(
                        f"parameter group {group} asks for {called}(name, parameter), "
                        "which is true for no parameter of the model"
                    )
            else:
                raise RunError(
                    f"parameter group {group} holds {shown(entry)}; write parameters, names, patterns or predicates"
                )
            found += [(self._canonical[name], self._whole[name]) for name in names]
        return found

    def here(self, name: str | None, tensor: Tensor) -> Tensor | None:
        """The parameter itself, if this rank holds it."""
        return tensor if name is None else self._here.get(name)

    def name_of(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), "")
