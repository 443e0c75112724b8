"""stage_boundary: nothing at all outside a capture, and inside one the same container with its tensors behind a cut."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.graph.boundary import recording
from fxpipe.graph.program import is_boundary
from tests.capturing import captured
from tests.work import steps

Pair = namedtuple("Pair", "left right")


class Opaque:
    pass


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        torch.ones(2, requires_grad=True),
        (torch.ones(2), 3),
        [torch.ones(2)],
        {"a": torch.ones(2), "b": {"c": (torch.ones(1),)}},
        OrderedDict(a=torch.ones(2)),
        Pair(torch.ones(1), torch.ones(2)),
        None,
        (),
        Opaque(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outside_a_capture_the_very_same_object_comes_back(value: Any) -> None:
    assert fxpipe.stage_boundary(value) is value
    assert fxpipe.stage_boundary(value, name="here") is value


def test_outside_a_capture_it_costs_one_function_call() -> None:
    def empty(value: Any, *, name: str | None = None) -> Any:
        return value

    x = torch.ones(1)
    assert steps(fxpipe.stage_boundary, x) == steps(empty, x)


def test_a_capture_is_of_one_thread_and_ends_with_an_error_inside_it() -> None:
    x, seen = torch.ones(1), []
    with recording(lambda value, name, gather: "captured"):
        thread = threading.Thread(target=lambda: seen.append(fxpipe.stage_boundary(x)))
        thread.start()
        thread.join()
        assert fxpipe.stage_boundary(x) == "captured"  # type: ignore[comparison-overlap]
    assert seen[0] is x
    assert fxpipe.stage_boundary(x) is x
    with pytest.raises(ZeroDivisionError), recording(lambda value, name, gather: 1 / 0):
        fxpipe.stage_boundary(x)
    assert fxpipe.stage_boundary(x) is x


TENSOR = torch.ones(2)
NOTHING_TO_CUT = "stage_boundary is given .*; give it the tensors that cross the cut"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (TENSOR, {"gather": "all"}, 'gather=\'all\'; write "batch", or "global" for the rows of all replicas'),
    (TENSOR, {"gather": True}, 'gather=True; write "batch"'),
    (TENSOR, {"group": 4}, 'group=4 and no gather; write gather="batch" beside it'),
    (TENSOR, {"gather": "batch", "group": 0}, "group=0; write how many micro-batches make a group, 1 or more"),
    (TENSOR, {"gather": "batch", "group": 2.0}, r"group=2\.0; write how many"),
    *((value, {}, NOTHING_TO_CUT) for value in (3, 3.5, True, "x", b"x")),
]


@pytest.mark.parametrize(("value", "options", "fact"), REFUSED)
def test_what_is_no_cut_and_no_way_to_gather_is_refused(value: Any, options: dict[str, Any], fact: str) -> None:
    with pytest.raises(fxpipe.TraceError, match=fact):
        fxpipe.stage_boundary(value, **options)


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda x, y: x, 1),
        (lambda x, y: (x, y), 2),
        (lambda x, y: [x, y, None], 2),
        (lambda x, y: {"x": x, "k": 3, "y": y}, 2),
        (lambda x, y: OrderedDict(x=x), 1),
        (lambda x, y: Pair(x, {"deep": [y, "text"]}), 2),
        (lambda x, y: (x, x), 2),
    ],
)
def test_a_captured_container_keeps_its_kind_and_what_is_no_tensor_in_it(make: Any, tensors: int) -> None:
    seen: list[Any] = []

    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            given = make(x, y)
            seen.extend([given, fxpipe.stage_boundary(given, name="cut")])
            return seen[1]

    (marker,) = filter(is_boundary, captured(Model()).graph.nodes)
    assert (len(marker.args[0]), marker.args[1]) == (tensors, "cut")
    (given, kind), (got, got_kind) = map(pytree.tree_flatten, seen)
    assert kind == got_kind
    for leaf, behind in zip(given, got, strict=True):
        assert type(leaf) is type(behind)
        assert isinstance(leaf, torch.fx.Proxy) or leaf is behind
