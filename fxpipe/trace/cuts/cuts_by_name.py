"""Boundaries from outside: what ``compile(boundaries=...)`` is given, as submodules and where each of them is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, TypeAlias, get_args

from torch import nn

from fxpipe.errors import PartitionError, TraceError, nearest, noted
from fxpipe.graph.boundary import Gather, checked_gather
from fxpipe.trace.opaque.regions import WHOLE, Region
from fxpipe.trace.request import Cut, GatheredCut, Side
from fxpipe.validation import shown

Rule: TypeAlias = str | Mapping[str, Any]
Boundaries: TypeAlias = (
    str
    | Sequence[str]
    | Set[str]
    | Mapping[str, Rule | Sequence[Rule]]
    | Callable[[dict[str, nn.Module]], "Boundaries"]
)
AUTO = "auto"
ALL = "*"
"""The name that goes with the rule "auto"."""
_EXAMPLES = (
    'a list of names, ["encoder.block.2"], a dict, {"head": "after"}, {"model.layers.*": {"every": 4}} or '
    '{"projection": {"cut": "after", "gather": "batch"}}, "auto", or a '
    "function of dict(model.named_modules()) that returns one of them"
)
_WITH_REGIONS = 'write "auto", or, with an opaque region beside it, {"*": "auto", "model.visual": "whole"}'


def resolve(model: nn.Module, boundaries: Boundaries) -> dict[str, Cut]:
    """Submodule path → where a boundary is put, in the order of the model.

    ``boundaries``: one or several names, each cut before; a dict of name → ``"before"``, ``"after"``, ``"both"``, or
    ``{"every": n, "cut": "before"}``, which cuts between groups of n, or ``{"cut": "after", "gather": "batch"}``, whose
    boundary gathers as that of ``stage_boundary`` does, a ``"group"`` beside it; or a function from the dict of all
    submodules to one of these. A name may be a pattern, ``"model.layers.*"``: each part of it matches one part of a
    path. What is said of a submodule twice adds up, as do the rules of a list. ``"auto"`` names nothing: see
    ``is_auto``; what is "whole" cuts nothing: see ``regions``. PartitionError for what names no submodule that can be
    cut.

    >>> resolve(nn.Sequential(*(nn.Identity() for _ in range(6))), {"*": {"every": 2}})
    {'2': 'before', '4': 'before'}
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    boundaries = named(model, boundaries)
    found: dict[str, dict[Side, Gather | None]] = {}
    for name, rule in _rules(model, boundaries):
        if _is_whole(rule) or (name, rule) == (ALL, AUTO):
            continue
        for path, side, gather in _cuts(name, rule, _matching(modules, name)):
            sides = found.setdefault(path, {})
            if sides.get(side) not in (None, gather):
                raise PartitionError(f"boundaries= gathers {side} {path!r} in two ways; write one")
            sides[side] = sides.get(side) or gather
    for path in found:
        _check_called(path, modules[path])
    for region in regions(model, boundaries):
        inside = next((path for path in found if path.startswith(f"{region.path}.")), None)
        if inside is not None and region.method == "__call__":
            raise PartitionError(
                f"boundaries= cuts {inside!r}, which is inside of {region.path!r}, and keeps that whole: one call in "
                "one stage; leave out one of them, or name smaller parts that are to be whole"
            )
    return {path: _cut(found[path]) for path in modules if path in found}


def regions(model: nn.Module, boundaries: Boundaries) -> tuple[Region, ...]:
    """The opaque regions of ``boundaries``: submodules, or methods of them, ``"model.get_rope_index"``.

    ``"whole"``; or ``{"whole": what it returns}``, of tensors on any device, for a model that cannot run beforehand.
    PartitionError for what is neither, and for a submodule that is whole inside of another.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, Region] = {}
    for name, rule in _rules(model, boundaries):
        if not _is_whole(rule):
            continue
        returns = None if isinstance(rule, str) else rule[WHOLE]
        if not isinstance(rule, str) and len(rule) > 1:
            other = next(key for key in rule if key != WHOLE)
            raise PartitionError(
                f'boundaries= gives {other!r} beside "whole" for {name!r}; give a list of two rules, ["whole", "after"]'
            )
        owner, _, method = name.rpartition(".")
        if _is_method(modules, name):
            if method in vars(modules[owner]):  # an opaque method is looked up in the class
                raise PartitionError(
                    f"boundaries= keeps {name!r} whole, which was set as an attribute of this "
                    f"{type(modules[owner]).__name__}, in place of the method of its class: set it on the class, or on "
                    "a class derived from it"
                )
            found.setdefault(name, Region(name, owner, method, returns))
            continue
        for path in _matching(modules, name):
            _check_called(path, modules[path])
            found.setdefault(path, Region(path, path, returns=returns))
    whole = [region.path for region in found.values() if region.method == "__call__"]
    for path in whole:
        outer = next((other for other in whole if path.startswith(f"{other}.")), None)
        if outer is not None:
            raise PartitionError(f"boundaries= keeps {path!r} whole inside of {outer!r}, which is whole; leave it out")
    return tuple(found.values())


def is_auto(model: nn.Module, boundaries: Boundaries) -> bool:
    """Whether the cuts are left to a search: ``"auto"``, or ``{"*": "auto"}``, beside which parts may be "whole".

    PartitionError for anything else beside it.
    """
    rules = list(_rules(model, boundaries))
    if (ALL, AUTO) not in rules:
        return False
    for name, rule in rules:
        if (name, rule) != (ALL, AUTO) and not _is_whole(rule):
            raise PartitionError(
                f'boundaries= gives {rule!r:.80} for {name!r} beside "auto", which finds all cuts by itself: keep '
                'parts whole beside it, {"*": "auto", "model.visual": "whole"}, or name all cuts'
            )
    return True


def _is_whole(rule: Any) -> bool:
    return rule == WHOLE if isinstance(rule, str) else isinstance(rule, Mapping) and WHOLE in rule


def _cut(sides: Mapping[Side, Gather | None]) -> Cut:
    side = next(iter(sides)) if len(sides) == 1 else "both"
    if all(gather is None for gather in sides.values()):
        return side
    return GatheredCut(side, sides.get("before"), sides.get("after"))


def named(model: nn.Module, boundaries: Boundaries) -> Boundaries:
    """What a function given as ``boundaries`` returns; anything else unchanged."""
    if not callable(boundaries):
        return boundaries
    with noted(lambda: "in the function that boundaries= gives, called with dict(model.named_modules())"):
        return boundaries(dict(model.named_modules(remove_duplicate=False)))


def _rules(model: nn.Module, boundaries: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of name and rule, whatever form they are given in."""
    boundaries = named(model, boundaries)
    if isinstance(boundaries, str):
        boundaries = {ALL: AUTO} if boundaries == AUTO else [boundaries]
    if not isinstance(boundaries, (Mapping, Sequence, Set)):
        raise PartitionError(f"boundaries= is {boundaries!r:.80}; give {_EXAMPLES}")
    rules = boundaries.items() if isinstance(boundaries, Mapping) else [(name, "before") for name in boundaries]
    for name, rule in rules:
        if not isinstance(name, str):
            raise PartitionError(f"boundaries= holds {name!r:.80}, which is no name; give {_EXAMPLES}")
        yield from ((name, one) for one in (rule if isinstance(rule, (list, tuple)) else [rule]))


def _is_method(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether it names a method of a submodule, or a property whose value is a function, as ``loss_function`` is."""
    owner, _, method = name.rpartition(".")
    if owner not in modules or name in modules or not name:
        return False
    found = getattr(type(modules[owner]), method, None)
    return callable(getattr(modules[owner], method, None) if isinstance(found, property) else found)


def _matching(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """The paths that a name or pattern means, in the order of the model."""
    if not name:
        raise PartitionError("boundaries= names '', the model itself; name the submodules where it is to be cut")
    if name in modules:
        return [name]
    if name == AUTO:
        raise PartitionError(f'boundaries= has "auto" where a submodule is named; {_WITH_REGIONS}')
    if _is_method(modules, name):
        raise PartitionError(
            f"boundaries= names {name!r}, a method, which may be whole, but is not cut, as calls of submodules are: "
            'name the submodule that is given what it returns, {...: "before"}, or put stage_boundary on that'
        )
    parts = name.split(".")
    found = [path for path in modules if path and fnmatched(path, parts)]
    if not found:
        what = "matches no submodule" if any(sign in name for sign in "*?[") else "is no submodule of the model"
        raise PartitionError(f"boundaries= names {name!r}, which {what}{_hint(modules, name)}")
    return found


def fnmatched(path: str, pattern: Sequence[str]) -> bool:
    """Whether each part of a submodule's path matches the pattern for it."""
    parts = path.split(".")
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))


def _hint(modules: Mapping[str, nn.Module], name: str) -> str:
    """The nearest path, or what there is at the first level where the name goes wrong."""
    hint = nearest(name, [path for path in [*modules, AUTO] if path])
    if "did you mean" in hint:
        return hint
    owner = name
    while owner not in modules:
        owner = owner.rpartition(".")[0]
    children = [f"{owner}.{child}" if owner else child for child, _ in modules[owner].named_children()]
    more = ", ..." if len(children) > 12 else ""
    return (nearest("", islice(children, 12)) or f'; "{owner}" has no submodules') + more


def _cuts(name: str, rule: Any, paths: Sequence[str]) -> Iterable[tuple[str, Side, Gather | None]]:
    """Where the submodules of one name are cut: (path, side, what its boundary gathers)."""
    gather = None
    if isinstance(rule, Mapping) and "every" not in rule and {"gather", "group"} & set(rule):
        rule, gather = _gathered(name, rule)
    if isinstance(rule, Mapping):
        return [(path, side, None) for path, side in _cuts_between_groups(name, rule, paths)]
    if rule == AUTO:
        raise PartitionError(f'boundaries= gives "auto" for {name!r}; it is for all of the model: {_WITH_REGIONS}')
    if not isinstance(rule, str) or rule not in get_args(Side):
        raise PartitionError(
            f'boundaries= gives {rule!r:.80} for {name!r}; give "before", "after", "both", "whole", {{"every": 4}} or '
            '{"cut": "after", "gather": "batch"}'
        )
    sides: list[Side] = [side for side in ("before", "after") if rule in (side, "both")]
    return [(path, side, gather) for path in paths for side in sides]


def _gathered(name: str, rule: Mapping[str, Any]) -> tuple[Any, Gather | None]:
    """Where a rule such as ``{"cut": "after", "gather": "batch", "group": 4}`` cuts, and what it gathers."""
    unknown = [key for key in rule if key not in ("cut", "gather", "group")]
    if unknown:
        raise PartitionError(
            f'boundaries= gives {shown(unknown[0])} for {name!r}; beside gather= there may be "cut" and "group"'
        )
    try:
        gather = checked_gather(f"boundaries= gives {name!r}", rule.get("gather"), rule.get("group"))
    except TraceError as error:
        raise PartitionError(str(error)) from None
    if "cut" not in rule:
        raise PartitionError(
            f'boundaries= gathers at {name!r}, and does not say on which side of it; write {{"cut": "after", ...}} to '
            'gather what it returns, or "before" for what it is given, so that it runs on the whole batch itself'
        )
    return rule["cut"], gather


def _cuts_between_groups(name: str, rule: Mapping[str, Any], paths: Sequence[str]) -> list[tuple[str, Side]]:
    """``{"every": n}``: before the first submodule of each group of n but the first; or after the last of each but the
    last."""
    every, cut = rule.get("every"), rule.get("cut", "before")
    known = cut in ("before", "after") and set(rule) <= {"every", "cut"}
    if not (known and isinstance(every, int) and every > 0) or every is True:
        raise PartitionError(
            f'boundaries= gives {dict(rule)!r:.80} for {name!r}; give {{"every": 4}}, a whole number, or '
            '{"every": 4, "cut": "after"}'
        )
    firsts = range(0, len(paths), every)[1:]
    if not firsts:
        raise PartitionError(
            f"boundaries= cuts between groups of {every} submodules that match {name!r}, and there are {len(paths)}: "
            f'that cuts nothing; give a smaller "every"'
        )
    return [(paths[first if cut == "before" else first - 1], cut) for first in firsts]


def _check_called(path: str, module: nn.Module) -> None:
    """A list or dict of modules is never called."""
    if getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module):
        raise PartitionError(
            f"boundaries= names {path!r}, a {type(module).__name__}, which is never called itself; name what it holds, "
            f'such as "{path}.{next((child for child, _ in module.named_children()), "*")}", or all of it, "{path}.*"'
        )
