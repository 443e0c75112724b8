"""The pass pipeline: passes in order, a check after each that names it, and what FXPIPE_DEBUG prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import PartitionError, passes, stage_boundary
from fxpipe.graph.program import Program
from fxpipe.passes.chain import chain
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


# ---- the check ----


def broken(change: Callable[[Program], Program]) -> Callable[[Program], Program]:
    def my_pass(program: Program) -> Program:
        return change(program)

    return my_pass


def without_first(program: Program) -> Program:
    """The producer of a value that is still used is gone."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    nodes = list(graph.nodes)
    nodes[0].append(nodes[-2])  # the last node in front of what it uses
    return program.replace(graph=graph)


def node_in_no_stage(program: Program) -> Program:
    return program.replace(stage_of={k: v for k, v in program.stage_of.items() if k != "sum_1"})


def node_in_two_places(program: Program) -> Program:
    return program.replace(copied=program.copied | {"first"}, stage_of=program.stage_of)


def behind_its_user_across_a_boundary(program: Program) -> Program:
    return program.replace(stage_of={name: 1 - stage for name, stage in program.stage_of.items()})


def fact_about_nothing(program: Program) -> Program:
    return program.replace(stage_of={**program.stage_of, "gone": 0})


def copy_that_needs_what_is_not_copied(program: Program) -> Program:
    stage_of = {name: stage for name, stage in program.stage_of.items() if name != "sum_1"}
    return program.replace(stage_of=stage_of, copied=program.copied | {"sum_1"})


def gap_in_the_stages(program: Program) -> Program:
    return program.replace(stage_of={name: 2 * stage for name, stage in program.stage_of.items()})


def one_name_for_two_stages(program: Program) -> Program:
    return program.replace(stage_names=("same", "same"))


def group_torn_apart(program: Program) -> Program:
    return program.replace(written=(*program.written, frozenset({"first", "second"})))


def no_program(program: Program) -> Any:
    return None


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (without_first, "not well formed"),
        (node_in_no_stage, "put sum_1 into 0 places"),
        (node_in_two_places, "put first into 2 places"),
        (behind_its_user_across_a_boundary, "behind add_, which uses it"),
        (fact_about_nothing, "nodes that are gone: ['gone']"),
        (copy_that_needs_what_is_not_copied, "copies sum_1, but not mul_1"),
        (gap_in_the_stages, "numbered the stages [0, 2]"),
        (one_name_for_two_stages, "named 2 stages ['same', 'same']"),
        (group_torn_apart, "share written memory, into stages [0, 1]"),
        (no_program, "returned NoneType; a pass returns a Program"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_program_is_noticed_after_the_pass_that_broke_it(
    change: Callable[[Program], Program], fact: str
) -> None:
    steps = (*passes.default(), broken(change), lambda program: pytest.fail("it goes on"))
    with pytest.raises(PartitionError) as caught:
        chain(steps, captured(Model()))
    assert "pass my_pass " in str(caught.value)
    assert fact in str(caught.value)


# ---- FXPIPE_DEBUG ----


def debug_output(level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("FXPIPE_DEBUG", level)
    chain(passes.default(), captured(Model()))
    printed = capsys.readouterr()
    assert printed.out == "", "standard output belongs to the user's program"
    return printed.err


@pytest.mark.parametrize("level", ["", "0"])
def test_level_0_prints_nothing(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert debug_output(level, monkeypatch, capsys) == ""


def test_level_1_prints_the_program_once_with_its_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = debug_output("1", monkeypatch, capsys)
    assert printed.count("-- program after") == 1
    assert "-- program after name_stages" in printed
    lines = {line.split(" :")[0]: line for line in printed.splitlines()}
    assert lines["%first"].endswith("# stage first")
    assert lines["%second"].endswith("# stage behind")
    assert lines["%gt"].endswith("# copied")


def test_level_2_prints_what_each_pass_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = debug_output("2", monkeypatch, capsys)
    assert "+++ after mark_copies" in printed
    changed = [line for line in printed.splitlines() if line.startswith("+%gt")]
    assert changed
    assert changed[0].endswith("# copied")
    assert any(line.startswith("-%gt") for line in printed.splitlines())
    assert "after alias_groups" not in printed, "it changes nothing that is printed"


def test_level_3_prints_the_program_after_each_pass_and_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = debug_output("3", monkeypatch, capsys)
    headers = [line for line in printed.splitlines() if line.startswith("-- program after")]
    assert [header.split()[3].rstrip(",") for header in headers] == [step.__name__ for step in passes.default()]
    assert all(header.endswith(" ms") for header in headers)
    assert printed.count("%second :") == len(headers)


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
