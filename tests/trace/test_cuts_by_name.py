"""Boundaries from outside: what names, patterns, rules and functions mean."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor, nn

import fxpipe
from fxpipe import PartitionError
from fxpipe.graph.boundary import Gather
from fxpipe.trace import Cut
from fxpipe.trace.cuts.cuts_by_name import resolve
from fxpipe.trace.request import GatheredCut


class Tree(nn.Module):
    """Two towers of six layers, some of them shared, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.ModuleDict(), nn.ModuleDict()
        self.image["layers"] = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))
        self.text["layers"] = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))
        self.text["tail"] = self.text["layers"][10]
        self.head = nn.Linear(4, 1)


def all_heads(modules: dict[str, nn.Module]) -> list[str]:
    return [name for name, module in modules.items() if isinstance(module, nn.Linear) and module.out_features == 1]


GIVEN: dict[str, tuple[Any, dict[str, Cut]]] = {
    "auto is for others": ("auto", {}),
    "a list": (["image.layers.2", "head"], {"image.layers.2": "before", "head": "before"}),
    "one name": ("head", {"head": "before"}),
    "a dict": ({"head": {"cut": "after"}, "text.tail": "before"}, {"text.tail": "before", "head": "after"}),
    "a pattern": (["image.layers.[13]"], {"image.layers.1": "before", "image.layers.3": "before"}),
    "a star is one level": ({"image.layers.5.*": "after"}, {"image.layers.5.0": "after", "image.layers.5.1": "after"}),
    "before and after add up": (
        {"image.layers.5": "before", "image.layers.[5]": "after"},
        {"image.layers.5": "both"},
    ),
    "every": ({"image.layers.*": {"every": 2}}, {"image.layers.2": "before", "image.layers.4": "before"}),
    "every, with a rest, counted by number": (
        {"text.layers.*": {"every": 5, "cut": "before"}},
        {"text.layers.5": "before", "text.layers.10": "before"},
    ),
    "every, behind": (
        {"image.layers.*": {"every": 3, "cut": "after"}},
        {"image.layers.2": "after"},
    ),
    "gathered in groups, and cut on the other side": (
        {"head": {"cut": "before", "gather": "global", "group": 4}, "hea?": "after"},
        {"head": GatheredCut("both", before=Gather("global", 4))},
    ),
    "gathered on both sides": (
        {"head": {"cut": "both", "gather": "batch"}},
        {"head": GatheredCut("both", Gather("batch"), Gather("batch"))},
    ),
    "a function that gives a list": (all_heads, {"head": "before"}),
}


@pytest.mark.parametrize("given", GIVEN)
def test_names_mean_submodules(given: str) -> None:
    boundaries, wanted = GIVEN[given]
    found = resolve(Tree(), boundaries).cuts
    assert list(found.items()) == list(wanted.items())


WRONG: dict[str, tuple[Any, str]] = {
    "an unknown name": (["image.layer.2"], "names 'image.layer.2', which is no submodule of the model; did you mean"),
    "a name below a leaf": (["head.qqqqqqqqqqqqqqq"], "which is no submodule of the model; known: "),
    "auto misspelt": ("atuo", 'did you mean "auto"'),
    "a pattern that matches nothing": (["image.blocks.*"], "names 'image.blocks.*', which matches no submodule; did"),
    "the model": ([""], "names '', the model itself"),
    "a list of modules": (["image.layers"], "'image.layers', a ModuleList, which is never called itself"),
    "no name": ([3], "holds 3, which is no name"),
    "no boundaries": (4, "boundaries= is 4; give a list of names"),
    "a wrong rule": ({"head": "behind"}, "gives 'behind' for 'head'; give \"before\""),
    "every none": ({"image.layers.*": {"every": 0}}, r"gives {'every': 0} for 'image.layers.*'"),
    "every what": ({"image.layers.*": {"every": 2, "by": 3}}, "gives {'every': 2, 'by': 3}"),
    "gathers what": ({"head": {"gather": "all"}}, "gives 'head' gather='all'; write \"batch\", or \"global\""),
    "gathers and more": ({"head": {"gather": "batch", "form": 1}}, "gives 'form' for 'head'; beside gather="),
    "gathers on no side": (
        {"head": {"gather": "batch"}},
        'gathers at \'head\', and does not say on which side of it; write {"cut": "after", ...}',
    ),
    "gathers in two ways": (
        {"head": {"cut": "before", "gather": "batch"}, "hea?": {"cut": "both", "gather": "global"}},
        "gathers before 'head' in two ways",
    ),
    "every too many": (
        {"image.layers.*": {"every": 6}},
        "groups of 6 submodules that match 'image.layers.*'",
    ),
}


@pytest.mark.parametrize("given", WRONG)
def test_what_names_nothing_that_could_be_cut_is_refused(given: str) -> None:
    boundaries, told = WRONG[given]
    with pytest.raises(PartitionError, match=re.escape(told)):
        resolve(Tree(), boundaries)


def test_a_module_list_with_a_forward_of_its_own_may_be_named() -> None:
    class Stack(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert resolve(nn.Sequential(Stack()), ["0"]).cuts == {"0": "before"}


def test_a_function_is_called_once() -> None:
    calls: list[int] = []

    def chosen(modules: dict[str, nn.Module]) -> list[str]:
        calls.append(len(modules))
        return ["1"]

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), loss_fn=lambda y, target: y.mean(), boundaries=chosen)
    assert calls == [3]
