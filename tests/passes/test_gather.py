"""gather: which stages run for a group of micro-batches, what enters them in which way, and what cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe import PartitionError, passes, stage_boundary
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.passes.chain import chain
from fxpipe.passes.split import split
from tests.capturing import captured, partitioned

Forward = Callable[[Any, Tensor, Tensor], Any]


class Towers(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.mean, self.var = (torch.nn.Buffer(value) for value in (torch.zeros(4), torch.ones(4)))
        self.run = forward

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run(self, x, y)


def batch(value: Any, group: int | None = None) -> Any:
    return stage_boundary(value, gather="batch", group=group)


def everyones(value: Any) -> Any:
    return stage_boundary(value, gather="global")


def graph_of(forward: Forward) -> StageGraph:
    return split(partitioned(Towers(forward)))


def told(graph: StageGraph) -> dict[str, tuple[int | None, set[str], dict[str, Any]]]:
    """Stage → group, modes, and input → way, of those that gather."""
    return {
        stage.name: (
            stage.gathered.group,
            set(stage.gathered.modes),
            dict(zip(stage.input_names, stage.ways, strict=True)),
        )
        for stage in graph
        if stage.gathered is not None
    }


def join(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(batch(m.a(x)), batch(m.b(y)))


BATCH, GLOBAL = {"batch"}, {"global"}
TAKEN: list[tuple[Forward, list[Any]]] = [
    (join, [(None, BATCH, {"a": "batch", "b": "batch"})]),
    (lambda m, x, y: F.mse_loss(everyones(m.a(x)), y), [(None, GLOBAL, {"y": "global", "a": "global"})]),
    (
        lambda m, x, y: F.mse_loss(m.head(stage_boundary(m.b(batch(m.a(x))))), y),
        [(None, BATCH, {"a": "batch"}), (None, BATCH, {"y": "batch", "b": None})],
    ),
    (
        lambda m, x, y: F.mse_loss(*everyones((m.b(batch(m.a(x))), m.head(y)))),
        [(None, BATCH, {"a": "batch"}), (None, GLOBAL, {"b": "global", "head": "global"})],
    ),
]


@pytest.mark.parametrize(("forward", "wanted"), TAKEN)
def test_a_stage_behind_a_gather_and_all_after_it_run_for_a_group(forward: Forward, wanted: list[Any]) -> None:
    assert list(told(graph_of(forward)).values()) == wanted


def test_a_value_comes_in_two_ways() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = m.a(x)
        own, place = batch((h, y))
        return (own @ everyones(h).T).sum() + place.sum() * everyones(y).sum()

    graph = graph_of(forward)
    last = graph[graph.output_stage]
    assert list(zip(last.input_names, last.ways, strict=True)) == [
        ("y", "batch"),
        ("y", "global"),
        ("a", "batch"),
        ("a", "global"),
    ]
    h, own_y, all_h, all_y = torch.randn(2, 3), torch.tensor(2.0), torch.randn(5, 3), torch.tensor(7.0)
    assert torch.equal(last.run(own_y, all_y, h, all_h)[0], (h @ all_h.T).sum() + 14)


@pytest.mark.parametrize("ask", [lambda v: v.shape[0], lambda v: v.size(0), lambda v: v.size()[0]])
def test_how_many_rows_there_are_is_asked_behind_the_gather(ask: Callable[[Tensor], int]) -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        v = batch(m.a(x))
        return F.cross_entropy(v @ v.T, torch.arange(ask(v), device=v.device))

    graph = graph_of(forward)
    assert len(graph) == 2
    rows = torch.randn(5, 4)
    wanted = F.cross_entropy(rows @ rows.T, torch.arange(5))
    assert torch.equal(graph[1].run(rows)[0], wanted)


def a_batch_norm(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.norm(batch(m.a(x))).sum()


def a_number_from_in_front(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)
    return batch(h).sum() / h.shape[0]


def an_input_in_neither_way(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)
    return (batch(h) @ everyones(h).T).sum() + y.sum()


REFUSED: dict[str, Forward] = {
    r"a number of each micro-batch; ask the gathered value for it: v = stage_boundary\(v": a_number_from_in_front,
    "is given b .*test_gather.*through no boundary that gathers.*write gather= there, too": (
        lambda m, x, y: F.mse_loss(batch(m.a(x)), stage_boundary(m.b(y)))
    ),
    r"is given groups of several sizes, group=\[2, 4\]; write one": (
        lambda m, x, y: F.mse_loss(batch(m.a(x), 2), batch(m.b(y), 4))
    ),
    r'is given y.*as "batch" and as "global"; say which this is: stage_boundary\(y, gather=': an_input_in_neither_way,
    r'is given b .*through gather="global", which is of every replica\'s rows already': (
        lambda m, x, y: everyones(m.b(everyones(m.a(x)))).sum()
    ),
    r"holds the batch norm 'norm'.*put it in front of the boundary, put it in eval\(\), or write a Layer": a_batch_norm,
}


@pytest.mark.parametrize("fact", REFUSED)
def test_what_cannot_enter_a_group_is_refused_with_what_to_write(fact: str) -> None:
    with pytest.raises(PartitionError, match=f"which runs once for a group of micro-batches, .*{fact}"):
        graph_of(REFUSED[fact])


def test_a_batch_norm_that_is_frozen_may_stand_behind_a_gather() -> None:
    model = Towers(a_batch_norm)
    model.norm.eval()
    assert told(split(partitioned(model)))


def test_a_pipeline_of_passes_without_it_is_refused() -> None:
    without = [step for step in passes.default() if step is not passes.gather]
    with pytest.raises(PartitionError, match="passes= leaves out the pass that sees to it"):
        split(chain(without, captured(Towers(join))))


@pytest.mark.parametrize(("group", "microbatches", "sizes"), [(None, 6, 6), (2, 6, 2), (6, 6, 6), (1, 6, 1)])
def test_a_group_has_all_micro_batches_or_as_many_as_it_says(group: Any, microbatches: int, sizes: int) -> None:
    graph = graph_of(lambda m, x, y: m.b(batch(m.a(x), group)).sum())
    assert graph.groups(microbatches) == (1, sizes)


def test_a_group_divides_the_micro_batches() -> None:
    graph = graph_of(lambda m, x, y: m.b(batch(m.a(x), 4)).sum())
    with pytest.raises(PartitionError, match="groups of 4 micro-batches, which do not divide the 6 of this batch"):
        graph.groups(6)
