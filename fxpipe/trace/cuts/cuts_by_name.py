"""Reads ``compile(boundaries=...)``: which submodules are cut, and on which side of their calls.

Takes: the model, and any of the forms that users write. Gives: ``Resolved`` with cuts (submodule's path → side), opaque
regions, and whether a search shall find the cuts.

1. ``_rules`` turns every form into pairs (name or pattern, rule).
2. A pattern becomes the paths that match it, in the model's order.
3. A rule "whole" becomes regions; all others become cuts, which add up for a submodule.
4. Contradictions are refused: cuts inside of opaque submodules, rules beside "auto", modules that are never called.

For example, for six layers, ``{"layers.*": {"every": 2}}`` cuts before ``layers.2`` and before ``layers.4``.

It runs nothing: whether forward calls a named submodule is seen in the capture (``cutting``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias, get_args

from torch import nn

from fxpipe.errors import PartitionError, TraceError, nearest, noted
from fxpipe.graph.boundary import Gather, checked_gather
from fxpipe.graph.cuts import Cuts
from fxpipe.stage.with_loss import plain_model
from fxpipe.trace.opaque.regions import WHOLE, Region
from fxpipe.trace.request import Cut, GatheredCut, Side
from fxpipe.validation import is_whole, shown

Rule: TypeAlias = str | Mapping[str, Any]
Boundaries: TypeAlias = (
    str
    | Cuts
    | Sequence[str]
    | Set[str]
    | Mapping[str, Rule | Sequence[Rule]]
    | Callable[[dict[str, nn.Module]], "Boundaries"]
)
AUTO = "auto"
ALL = "*"
"""The name for the rule "auto", as in ``{"*": "auto"}``."""
_EXAMPLES = (
    'a list of names, ["encoder.block.2"], a dict, {"head": "after"}, {"model.layers.*": {"every": 4}} or '
    '{"projection": {"cut": "after", "gather": "batch"}}, "auto", or a '
    "function of dict(model.named_modules()) that returns one of them"
)
_WITH_REGIONS = 'write "auto", or, with an opaque region beside it, {"*": "auto", "model.visual": "whole"}'


class Resolved(NamedTuple):
    """``boundaries=``, read for a model. ``cuts``: submodule path → the side of each boundary, in the model's order.

    ``finds_cuts``: whether a search chooses the cuts, as ``"auto"`` or ``{"*": "auto"}`` asks for, or chose the cuts
    ``found``, which are given in its place.
    """

    cuts: dict[str, Cut]
    whole: tuple[Region, ...]
    finds_cuts: bool
    found: Cuts | None


def resolve(model: nn.Module, boundaries: Boundaries) -> Resolved:
    """Reads ``boundaries=``; PartitionError for a name of no submodule that can be cut, or be opaque.

    ``boundaries``: one or several names, each cut before; a dict of name → rule; or a function from the dict of all
    submodules to any of these. These are the rules:

    - ``"before"``, ``"after"``, ``"both"``: where each call is cut.
    - ``{"every": n, "cut": "before"}``: cuts between groups of n submodules.
    - ``{"cut": "after", "gather": "batch"}``: the boundary gathers as ``stage_boundary`` does; ``"group"`` is optional.

    A name may be a pattern, ``"model.layers.*"``: each part of the pattern matches one part of a path. Several rules
    for a submodule add up, as do the rules of a list.

    ``"whole"`` makes submodules, or a method, ``"model.get_rope_index"``, opaque regions. So does ``{"whole": result}``
    for a model that cannot run beforehand: ``result`` describes the call's result by tensors on any device.

    >>> resolve(nn.Sequential(*(nn.Identity() for _ in range(6))), {"*": {"every": 2}}).cuts
    {'2': 'before', '4': 'before'}
    """
    modules = dict(plain_model(model).named_modules(remove_duplicate=False))
    # 1. rules
    rules = list(_rules(modules, boundaries))
    found = next((rule for name, rule in rules if name == ALL and isinstance(rule, Cuts)), None)
    finds_cuts = found is not None or (ALL, AUTO) in rules
    cuts: dict[str, dict[Side, Gather | None]] = {}
    regions: dict[str, Region] = {}
    for name, rule in rules:
        if name == ALL and rule in (AUTO, found):
            continue
        # 2. and 3. paths, and what they become
        if _is_whole(rule):
            for region in _regions(modules, name, rule):
                regions.setdefault(region.name, region)  # the first rule for a region counts
            continue
        if finds_cuts:
            raise PartitionError(
                f'boundaries= gives {rule!r:.80} for {name!r} beside "auto", which finds all cuts by itself: keep '
                'parts whole beside it, {"*": "auto", "model.visual": "whole"}, or name all cuts'
            )
        # rules add up: two rules may cut the same submodule, before and after
        for path, side, gather in _cuts(name, rule, _matching(modules, name)):
            _check_called(path, modules[path])
            sides = cuts.setdefault(path, {})
            if sides.get(side) not in (None, gather):
                raise PartitionError(f"boundaries= gathers {side} {path!r} in two ways; write one")
            sides[side] = sides.get(side) or gather
    # 4. cuts and regions together
    _check_outside(cuts, regions.values())
    cut = {path: _cut(cuts[path]) for path in modules if path in cuts}
    return Resolved(cut, (*regions.values(),), finds_cuts, found)


def _check_outside(cut: Iterable[str], regions: Collection[Region]) -> None:
    """PartitionError for a cut, or an opaque submodule, inside of an opaque submodule, which runs as one call."""
    whole = [region.path for region in regions if region.method == "__call__"]
    for outer in whole:
        inside = next((path for path in cut if path.startswith(f"{outer}.")), None)
        if inside is not None:
            raise PartitionError(
                f"boundaries= cuts {inside!r}, which is inside of {outer!r}, and keeps that whole: one call in "
                "one stage; leave out one of them, or name smaller parts that are to be whole"
            )
        inner = next((path for path in whole if path.startswith(f"{outer}.")), None)
        if inner is not None:
            raise PartitionError(f"boundaries= keeps {inner!r} whole inside of {outer!r}, which is whole; leave it out")


def _is_whole(rule: Any) -> bool:
    """Whether a rule makes a part opaque."""
    return rule == WHOLE if isinstance(rule, str) else isinstance(rule, Mapping) and WHOLE in rule


def _regions(modules: Mapping[str, nn.Module], name: str, rule: str | Mapping[str, Any]) -> list[Region]:
    """The opaque regions of a name or pattern: the matching submodules, or a method."""
    returns = None if isinstance(rule, str) else rule[WHOLE]
    if not isinstance(rule, str) and len(rule) > 1:
        other = next(key for key in rule if key != WHOLE)
        raise PartitionError(
            f'boundaries= gives {other!r} beside "whole" for {name!r}; give a list of two rules, ["whole", "after"]'
        )
    owner, _, method = name.rpartition(".")
    if not _is_method(modules, name):
        paths = _matching(modules, name)
        for path in paths:
            _check_called(path, modules[path])
        return [Region(path, path, returns=returns) for path in paths]
    if method in vars(modules[owner]):  # fxpipe patches an opaque method on the class
        raise PartitionError(
            f"boundaries= keeps {name!r} whole, which was set as an attribute of this {type(modules[owner]).__name__}, "
            "in place of the method of its class: set it on the class, or on a class derived from it"
        )
    return [Region(name, owner, method, returns)]


def _cut(sides: Mapping[Side, Gather | None]) -> Cut:
    """The form in which a ``Request`` has the cut: only the side, unless a boundary gathers."""
    side = next(iter(sides)) if len(sides) == 1 else "both"
    if all(gather is None for gather in sides.values()):
        return side
    return GatheredCut(side, sides.get("before"), sides.get("after"))


def _rules(modules: dict[str, nn.Module], boundaries: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, rule) for any form of ``boundaries=``."""
    if callable(boundaries):
        with noted(lambda: "in the function that boundaries= gives, called with dict(model.named_modules())"):
            boundaries = boundaries(dict(modules))
    if isinstance(boundaries, str | Cuts):
        boundaries = {ALL: boundaries} if boundaries == AUTO or isinstance(boundaries, Cuts) else [boundaries]
    if not isinstance(boundaries, (Mapping, Sequence, Set)):
        raise PartitionError(f"boundaries= is {boundaries!r:.80}; give {_EXAMPLES}")
    rules = boundaries.items() if isinstance(boundaries, Mapping) else [(name, "before") for name in boundaries]
    for name, rule in rules:
        if not isinstance(name, str):
            raise PartitionError(f"boundaries= holds {name!r:.80}, which is no name; give {_EXAMPLES}")
        yield from ((name, item) for item in (rule if isinstance(rule, (list, tuple)) else [rule]))


def _is_method(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether the name is of a submodule's method, or of a property whose value is a function, as ``loss_function``."""
    owner, _, method = name.rpartition(".")
    if owner not in modules or name in modules or not name:
        return False
    attribute = getattr(type(modules[owner]), method, None)
    return callable(getattr(modules[owner], method, None) if isinstance(attribute, property) else attribute)


def _matching(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """The submodule paths that match a name or pattern, in the model's order."""
    if not name:
        raise PartitionError("boundaries= names '', the model itself; name the submodules where it is to be cut")
    parts = name.split(".")
    paths = [name] if name in modules else [path for path in modules if path and fnmatched(path, parts)]
    if paths:
        return paths
    if name == AUTO:
        raise PartitionError(f'boundaries= has "auto" where a submodule is named; {_WITH_REGIONS}')
    what = "matches no submodule" if any(sign in name for sign in "*?[") else "is no submodule of the model"
    if _is_method(modules, name):
        what = 'is a method: it may be "whole", and only calls of submodules are cut'
    raise PartitionError(f"boundaries= names {name!r}, which {what}{nearest(name, filter(None, [*modules, AUTO]))}")


def fnmatched(path: str, pattern: Sequence[str]) -> bool:
    """Whether each part of a submodule's path matches the same part of the pattern."""
    parts = path.split(".")
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))


def _cuts(name: str, rule: Any, paths: Sequence[str]) -> Iterable[tuple[str, Side, Gather | None]]:
    """The cuts that a rule makes at the submodules ``paths``: (path, side, the boundary's gather)."""
    gather = None
    if isinstance(rule, Mapping):
        if "every" in rule:
            return _cuts_between_groups(name, rule, paths)
        rule, gather = _gathered(name, rule)
    if not isinstance(rule, str) or rule not in get_args(Side):
        raise PartitionError(
            f'boundaries= gives {rule!r:.80} for {name!r}; give "before", "after", "both", "whole", {{"every": 4}} or '
            '{"cut": "after", "gather": "batch"}; "auto" is for all of the model, "*"'
        )
    sides: list[Side] = [side for side in ("before", "after") if rule in (side, "both")]
    return [(path, side, gather) for path in paths for side in sides]


def _gathered(name: str, rule: Mapping[str, Any]) -> tuple[Any, Gather | None]:
    """The side and the gather of a rule such as ``{"cut": "after", "gather": "batch", "group": 4}``."""
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


def _cuts_between_groups(
    name: str, rule: Mapping[str, Any], paths: Sequence[str]
) -> list[tuple[str, Side, Gather | None]]:
    """``{"every": n}``: cuts before the first submodule of each group of n, except the first group; or after the last
    submodule of each group, except the last group."""
    every, cut = rule["every"], rule.get("cut", "before")
    if cut not in ("before", "after") or not set(rule) <= {"every", "cut"} or not is_whole(every) or every < 1:
        raise PartitionError(
            f'boundaries= gives {dict(rule)!r:.80} for {name!r}; give {{"every": 4}}, a whole number, or '
            '{"every": 4, "cut": "after"}'
        )
    firsts = range(0, len(paths), every)[1:]
    if not firsts:
        raise PartitionError(
            f"boundaries= cuts between groups of {every} submodules that match {name!r}, and there are {len(paths)}; "
            'give a smaller "every"'
        )
    return [(paths[first if cut == "before" else first - 1], cut, None) for first in firsts]


def _check_called(path: str, module: nn.Module) -> None:
    """PartitionError for a module without a forward, such as a ModuleList, which is never called."""
    if getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module):
        raise PartitionError(
            f"boundaries= names {path!r}, a {type(module).__name__}, which is never called itself; name what it holds, "
            f'such as "{path}.{next((child for child, _ in module.named_children()), "*")}", or all of it, "{path}.*"'
        )
