"""Order writes: what reads behind a write comes to use its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe.graph.operators import setitem
from fxpipe.graph.program import Program
from fxpipe.passes import order_writes
from tests.capturing import Model, captured, names


def operands(program: Program, name: str) -> set[str]:
    return names(next(node for node in program.graph.nodes if node.name == name).all_input_nodes)


def test_what_reads_after_a_write_comes_to_use_its_result() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        before = x * 2
        x.add_(y)
        return before, x * 3

    program = order_writes(captured(Model(body)))
    assert operands(program, "mul") == {"x"}
    assert operands(program, "mul_1") == {"add_"}


def test_an_item_assignment_becomes_an_expression_that_keeps_its_line() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        x[0] = y
        x[1] = 2
        return x * 3

    program = order_writes(captured(Model(body)))
    first, second = program.graph.find_nodes(op="call_function", target=setitem)
    assert names(second.all_input_nodes) == {first.name}
    assert operands(program, "mul") == {second.name}
    assert "x[0] = y" in (first.stack_trace or "")
    x, y = torch.zeros(2, 2), torch.ones(2)
    assert torch.equal(fx.GraphModule(nn.Module(), program.graph)(x, y), torch.tensor([[3.0, 3.0], [6.0, 6.0]]))


@pytest.mark.parametrize(
    "write",
    [
        lambda m, x, y: x.add_(y),
        lambda m, x, y: F.relu(x, inplace=True),
        lambda m, x, y: F.relu(x, True),
        lambda m, x, y: torch.add(y, 1, out=x),
        lambda m, x, y: m.part(x),
        lambda m, x, y: x.__imul__(y),
    ],
)
def test_every_kind_of_write_is_an_edge_to_the_next_read(write: Callable[..., Any]) -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        write(m, x, y)
        return x - 3

    program = order_writes(captured(Model(body, part=nn.ReLU(inplace=True))))
    (read,) = [node for node in program.graph.nodes if node.name == "sub"]
    (written,) = read.all_input_nodes
    assert written.op.startswith("call_")


def test_batch_norm_does_not_return_what_it_writes() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = F.batch_norm(x, m.running_mean, m.running_var, training=True)
        return z * m.running_mean

    assert operands(order_writes(captured(Model(body))), "mul") == {"batch_norm", "running_mean"}


def test_the_given_program_stays_as_it_is() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        x[0] = 1
        return x * 2

    program = captured(Model(body))
    before = str(program)
    order_writes(program)
    assert str(program) == before
