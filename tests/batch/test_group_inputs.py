"""Group inputs: values of micro-batches put together as a group's, its gradients cut up again, and over replicas."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe import RunError, Topology
from fxpipe.batch.group_inputs import SCOPE, GroupInputs
from fxpipe.distributed.transport import LocalTransport
from fxpipe.graph.gathering import Places
from fxpipe.torch_compat import pytree
from tests.strict_transport import StrictTransport, current_seat, run_strict

ALL = range(3)
ROWS = (2, 3, 2)


NOT_KNOWN: Places = {}


def inputs(batch_dim: Any = 0, rows: Any = ROWS, is_cut: bool = False, places: Places = NOT_KNOWN) -> GroupInputs:
    return GroupInputs(LocalTransport(), batch_dim, rows, is_cut, places)


def cut(value: Tensor, along: int = 0) -> list[Tensor]:
    return list(value.split(list(ROWS), along))


def test_rows_stand_in_a_row_and_the_gradient_is_cut_where_they_were() -> None:
    value = torch.randn(7, 4, requires_grad=True)
    joined, how = inputs().of_stage("v", "a", cut(value), ALL, "batch")
    assert joined.requires_grad
    assert joined.grad_fn is None
    assert torch.equal(joined, value)
    gradient = torch.randn(7, 4)
    assert all(map(torch.equal, inputs().cut(how, gradient), cut(gradient)))


@pytest.mark.parametrize(("shape", "place"), [((5, 7, 3), 1), ((7, 5), 0), ((2, 5, 7), 2)])
def test_rows_are_where_sizes_show_them(shape: tuple[int, ...], place: int) -> None:
    value = torch.randn(shape)
    joined, how = inputs().of_stage("v", "a", cut(value, place), ALL, "batch")
    assert torch.equal(joined, value)
    assert list(how.dims) == [place]


def test_of_two_dimensions_with_as_many_the_known_one_is_that_of_the_rows() -> None:
    value, rows = torch.randn(4, 8), (4, 4)
    parts = value.split(rows, 1)
    with pytest.raises(
        RunError, match=r"\[4, 4\] for micro-batches of \[4, 4\] rows: its rows are in one dimension, and 2 could be"
    ):
        inputs(rows=rows).of_stage("v", "a", parts, range(2), "batch")
    joined, how = inputs(rows=rows, places={("v", 0): (1,)}).of_stage("v", "a", parts, range(2), "batch")
    assert torch.equal(joined, value)
    assert list(how.dims) == [1]
    with pytest.raises(RunError, match="its rows are in one dimension, and 0 could be it"):
        inputs(rows=rows, places={("v", 0): ()}).of_stage("v", "a", parts, range(2), "batch")


def test_a_container_keeps_its_form_and_what_needs_no_gradient_gets_none() -> None:
    value, mask = torch.randn(7, 4, requires_grad=True), torch.ones(7, dtype=torch.bool)
    parts = [{"v": v, "mask": m, "none": None} for v, m in zip(cut(value), cut(mask), strict=True)]
    joined, how = inputs().of_stage("v", "a", parts, ALL, "batch")
    assert torch.equal(joined["v"], value)
    assert torch.equal(joined["mask"], mask)
    assert joined["none"] is None
    gradients = inputs().cut(how, {"v": torch.ones(7, 4), "mask": None, "none": None})
    assert [one["v"].shape[0] for one in gradients] == list(ROWS)
    assert all(one["mask"] is None for one in gradients)


def test_a_value_that_got_no_gradient_sends_none_back() -> None:
    _, how = inputs().of_stage("v", "a", cut(torch.randn(7, 4, requires_grad=True)), ALL, "batch")
    assert inputs().cut(how, None) == [None] * 3


@pytest.mark.parametrize("parts", [[torch.tensor(1.0)] * 3, [2, 3, 2]])
def test_a_number_for_each_micro_batch_is_refused(parts: list[Any]) -> None:
    with pytest.raises(
        RunError, match=r"n of stage 'a' is gathered, and is one number for each micro-batch, .*compute it behind"
    ):
        inputs().of_stage("n", "a", parts, ALL, "batch")


def test_inputs_are_gathered_by_their_own_dimension_and_whole_ones_stay() -> None:
    x, y = torch.randn(7, 2), torch.randn(4, 7)
    group = inputs(batch_dim={"y": 1, "table": None})
    assert torch.equal(group.of_batch("x", cut(x), ALL, "batch"), x)
    assert torch.equal(group.of_batch("y", cut(y, 1), ALL, "batch"), y)
    table, scale = torch.randn(3), torch.tensor(2.0)
    assert group.of_batch("table", [table] * 3, ALL, "batch") is table
    assert group.of_batch("scale", [scale, scale.clone(), scale], ALL, "batch") is scale
    assert group.of_batch("place", [7, 7, 7], ALL, "batch") == 7


@pytest.mark.parametrize("parts", [[torch.tensor(1.0), torch.tensor(2.0)], [1, 2], [torch.ones(2), torch.ones(3)]])
def test_a_whole_input_that_differs_between_micro_batches_is_refused(parts: list[Any]) -> None:
    group = inputs(batch_dim={"n": None}, rows=(2, 2))
    with pytest.raises(RunError, match=r"input 'n' has no rows and is not the same for all micro-batches"):
        group.of_batch("n", parts, range(2), "batch")


def over_replicas(rows: list[tuple[int, ...]], along: int, has_gradient: list[bool]) -> Any:
    """On a replica: what it is given of all rows, and the gradient of its own parts."""
    seat = current_seat()
    assert seat is not None
    topology = Topology([("data", len(rows))])
    transport = StrictTransport(seat, topology)
    transport.open([], [], {SCOPE: topology.groups("data")})
    mine, sizes = rows[seat.rank], [sum(one) for one in rows]
    group = GroupInputs(transport, along, mine, True, NOT_KNOWN, rows)
    own = whole(sum(sizes), along).split(sizes, along)[seat.rank].requires_grad_()
    joined, how = group.of_stage("v", "a", own.split(list(mine), along), range(len(mine)), "global")
    gradient = (1 + seat.rank) * joined.detach() if has_gradient[seat.rank] else None
    return joined, group.cut(how, gradient)


def whole(rows: int, along: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64).movedim(0, along).contiguous()


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("has_gradient", [[True, True, True], [True, False, True]], ids=["all", "not the second"])
def test_replicas_see_all_rows_in_their_order_and_gradients_are_summed(along: int, has_gradient: list[bool]) -> None:
    rows = [(2, 1), (4, 1), (1, 1)]
    results = run_strict(lambda rank: over_replicas(rows, along, has_gradient), 3, 0)
    sizes = [sum(one) for one in rows]
    everyones = whole(sum(sizes), along)
    factor = sum(place + 1 for place, has in enumerate(has_gradient) if has)
    for (joined, parts), mine, own in zip(results, rows, everyones.split(sizes, along), strict=True):
        assert torch.equal(joined, everyones)
        assert joined.requires_grad
        for part, wanted in zip(parts, (factor * own).split(list(mine), along), strict=True):
            assert torch.allclose(part, wanted, rtol=1e-14, atol=0)


def test_parts_of_other_sizes_beside_their_rows_are_refused() -> None:
    parts = [torch.ones(2, 5), torch.ones(3, 4), torch.ones(2, 5)]
    told = r"has shapes \[2, 5\], \[3, 4\], \[2, 5\], which differ beside its rows; pad it to one size"
    with pytest.raises(RunError, match=f"v of stage 'a' is gathered, and {told}"):
        inputs(places={("v", 0): (0,)}).of_stage("v", "a", parts, ALL, "batch")
    with pytest.raises(RunError, match=f"input 'x' is gathered, and {told}"):
        inputs().of_batch("x", parts, ALL, "batch")


def in_other_sizes(values: list[Any], is_input: bool) -> str:
    """What a replica is told."""
    seat = current_seat()
    assert seat is not None
    topology = Topology([("data", len(values))])
    transport = StrictTransport(seat, topology)
    transport.open([], [], {SCOPE: topology.groups("data")})
    group = GroupInputs(transport, 0, (3,), True, {("v", 0): (0,)}, [(3,)] * len(values))
    take = partial(group.of_batch, "v") if is_input else partial(group.of_stage, "v", "a")
    with pytest.raises(RunError) as caught:
        take([values[seat.rank]], range(1), "global")
    return str(caught.value)


@pytest.mark.parametrize("is_input", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        [torch.ones(3, 5), torch.ones(3, 4)],
        [torch.ones(3, 5), torch.ones(3, 5, requires_grad=True)],
        [[torch.ones(3, 5), None], [torch.ones(3, 5), torch.ones(3)]],
    ],
    ids=["another length", "a gradient", "a mask"],
)
def test_replicas_whose_rows_do_not_go_together_are_all_told(values: list[Any], is_input: bool) -> None:
    for rank, told in enumerate(run_strict(lambda rank: in_other_sizes(values, is_input), 2, 0)):
        assert "v" in told
        assert "is gathered over the replicas, which have it in other sizes" in told
        assert str(list(pytree.tree_leaves(values[rank])[0].shape)) in told
