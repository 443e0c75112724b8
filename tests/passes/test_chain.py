"""The pass pipeline: passes in order, a check after each that names it, and what FXPIPE_DEBUG prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import PartitionError, passes, stage_boundary
from fxpipe.graph.program import Program, is_compute
from fxpipe.options import TracerName
from fxpipe.passes.chain import chain
from fxpipe.trace import TRACERS
from tests.capturing import captured


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        h = stage_boundary(self.first(x) * mask, name="behind")
        h.add_(1)
        return (self.second(h) * mask).sum()


def without_first(program: Program) -> Program:
    """The producer of a value that is still used is gone."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    nodes = list(graph.nodes)
    nodes[0].append(nodes[-2])  # the last node in front of what it uses
    return program.replace(graph=graph)


def without(names: dict[str, int], name: str) -> dict[str, int]:
    return {other: stage for other, stage in names.items() if other != name}


BROKEN: dict[str, Callable[[Program], Any]] = {
    "not well formed": without_first,
    "put sum_1 into 0 places": lambda p: p.replace(stage_of=without(p.stage_of, "sum_1")),
    "put first into 2 places": lambda p: p.replace(copied=p.copied | {"first"}),
    "behind add_, which uses it": lambda p: p.replace(stage_of={name: 1 - stage for name, stage in p.stage_of.items()}),
    "nodes that are gone: ['gone']": lambda p: p.replace(stage_of={**p.stage_of, "gone": 0}),
    "copies sum_1, but not mul_1": lambda p: p.replace(
        stage_of=without(p.stage_of, "sum_1"), copied=p.copied | {"sum_1"}
    ),
    "numbered the stages [0, 2]": lambda p: p.replace(stage_of={n: 2 * stage for n, stage in p.stage_of.items()}),
    "named 2 stages ['same', 'same']": lambda p: p.replace(stage_names=("same", "same")),
    "share written memory, into stages [0, 1]": lambda p: p.replace(
        written=(*p.written, frozenset({"first", "second"}))
    ),
    "returned NoneType; a pass returns a Program": lambda p: None,
}


@pytest.mark.parametrize("fact", BROKEN)
def test_a_broken_program_is_noticed_after_the_pass_that_broke_it(fact: str) -> None:
    def my_pass(program: Program) -> Any:
        return BROKEN[fact](program)

    with pytest.raises(PartitionError, match=rf"pass my_pass .*{re.escape(fact)}"):
        chain((*passes.default(), my_pass, lambda program: pytest.fail("it goes on")), captured(Model()))


def test_the_debug_level_says_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {}
    for level in ("", "0", "1", "2", "3"):
        monkeypatch.setenv("FXPIPE_DEBUG", level)
        chain(passes.default(), captured(Model()))
        out, printed[level] = capsys.readouterr()
        assert out == "", "standard output belongs to the user's program"
    assert printed[""] == printed["0"] == ""
    # 1: the program, once, with its stages
    assert printed["1"].count("-- program after") == printed["1"].count("-- program after name_stages") == 1
    lines = {line.split(" :")[0]: line for line in printed["1"].splitlines()}
    for node, end in (("first", "# stage first"), ("second", "# stage behind"), ("gt", "# copied")):
        assert lines[f"%{node}"].endswith(end)
    # 2: what each pass changed, and nothing of one that changes nothing that is printed
    assert "+++ after mark_copies" in printed["2"]
    assert re.search(r"^-%gt.*\n(.*\n)*?\+%gt.*# copied$", printed["2"], re.MULTILINE)
    assert "after alias_groups" not in printed["2"]
    # 3: the program after each pass, and its time
    headers = [line for line in printed["3"].splitlines() if line.startswith("-- program after")]
    assert [header.split()[3].rstrip(",") for header in headers] == [step.__name__ for step in passes.default()]
    assert all(header.endswith(" ms") for header in headers)
    assert printed["3"].count("%second :") == len(headers)


def test_an_unknown_level_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_DEBUG", "4")
    with pytest.raises(PartitionError, match=r"FXPIPE_DEBUG is '4'; it is one of 0, 1 .*2 .*3 "):
        chain(passes.default(), captured(Model()))


# ---- a pass of the user's own ----


def use_tanh(program: Program) -> Program:
    """Puts a tanh behind every Linear."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in graph.find_nodes(op="call_module"):
        with graph.inserting_after(node):
            tanh = graph.call_function(torch.tanh, (node,))
        node.replace_all_uses_with(tanh, delete_user_cb=lambda user, tanh=tanh: user is not tanh)
    return replace(program, graph=graph)


def test_a_pass_of_ones_own_is_a_function_in_the_tuple() -> None:
    class Tanh(Model):
        def forward(self, x: Tensor) -> Tensor:
            mask = x > 0
            h = self.first(x).tanh() * mask + 1
            return (self.second(h).tanh() * mask).sum()

    topology = fxpipe.Topology([("pipe", 2)])
    step = fxpipe.compile(Model(), topology, microbatches=1, passes=(use_tanh, *passes.default()))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(step(x), Tanh()(x))


@pytest.mark.parametrize(
    ("tracer", "given"),
    [*((name, True) for name in TRACERS), *((name, False) for name in ("symbolic", "auto"))],
)
def test_a_pass_of_ones_own_knows_the_shapes_of_the_example(tracer: TracerName, given: bool) -> None:
    programs: list[Program] = []

    def seen(program: Program) -> Program:
        programs.append(program)
        return program

    options: Any = {"example_args": (torch.randn(6, 4),)} if given else {}
    topology = fxpipe.Topology([("pipe", 2)])
    tracing = fxpipe.Tracing(tracer, check=False)  # the model's loss is a sum
    fxpipe.compile(Model(), topology, microbatches=3, tracer=tracing, passes=(*passes.default(), seen), **options)
    shapes = programs[0].shapes
    assert given == bool(shapes)
    if given:
        by_node = {node: shapes[node.name] for node in programs[0].nodes if node.op != "output"}
        assert {shape for node, (shape,) in by_node.items() if is_compute(node)} == {(2, 4), ()}
        assert [by_node[node] for node in programs[0].nodes if node.op == "placeholder"] == [((2, 4),)]
