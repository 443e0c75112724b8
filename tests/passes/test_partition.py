"""Which node lives in which stage: the contract's worked cases, and what else its rule says."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe import PartitionError, passes
from fxpipe import stage_boundary as b
from fxpipe.graph.boundary import boundary
from fxpipe.graph.program import Program
from fxpipe.passes.chain import chain
from tests.capturing import edges_of, partitioned, run_stages, stages_of
from tests.thinned import every
from tests.work import steps


def net(forward: Callable[..., Any], one: str = "", two: str = "", **parts: Any) -> nn.Module:
    """A module with that forward. ``one``: names of submodules of one argument, ``two``: of two; all have weights."""
    torch.manual_seed(0)
    model: nn.Module = type("Net", (nn.Module,), {"forward": forward})()
    for name in one.split():
        model.add_module(name, nn.Linear(4, 4))
    for name in two.split():
        model.add_module(name, nn.Bilinear(4, 4, 4))
    for name, part in parts.items():
        if type(part) is Tensor:
            model.register_buffer(name, part)
        else:
            setattr(model, name, part)
    return model


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(3, 4, generator=generator) for name in inspect.signature(model.forward).parameters}


def assert_same_result(model: nn.Module, program: Program) -> None:
    """The stages, run one after another, compute what the model does, and leave the batch as it was."""
    inputs = inputs_of(model)
    torch.manual_seed(2)
    found = run_stages(passes.split(program), inputs)
    assert all(torch.equal(value, inputs_of(model)[name]) for name, value in inputs.items())
    torch.manual_seed(2)
    torch.testing.assert_close(found, model(**inputs), rtol=0, atol=0)


@dataclass(frozen=True)
class Case:
    """``stages``: what each computes, copies aside, in program order. ``edges``: "value: from → to"."""

    forward: Callable[..., Any]
    stages: list[str]
    edges: str
    one: str
    two: str
    parts: Callable[[], dict[str, Any]]


CASES: list[Case] = []
REFUSED: list[tuple[Callable[..., Any], str, str]] = []


def case(stages: list[str], edges: str, one: str, two: str = "", parts: Callable[[], dict[str, Any]] = dict) -> Any:
    """Puts a forward into CASES."""
    return lambda forward: CASES.append(Case(forward, stages, edges, one, two, parts)) or forward


def refused(fact: str, line: str) -> Any:
    """Puts a forward into REFUSED, with what is told and the line of it that is shown."""
    return lambda forward: REFUSED.append((forward, fact, line)) or forward


def frozen() -> dict[str, Any]:
    return {"frozen": nn.Linear(4, 4).requires_grad_(False)}


def scale() -> dict[str, Any]:
    return {"scale": nn.Parameter(torch.tensor(0.5))}


# The contract's table, row by row, and then more of what it says in words.


@case(["a", "c t loss"], "a: 0→1", "a c t", "loss")
def text_in_the_last_stage(m: Any, img: Any, txt: Any) -> Any:
    v = b(m.a(img))
    v = m.c(v)
    t = m.t(txt)
    return m.loss(v, t)


@case(["a", "t", "loss"], "a: 0→2, t: 1→2", "a t", "loss")
def two_towers(m: Any, img: Any, txt: Any) -> Any:
    v = b(m.a(img))
    t = b(m.t(txt))
    return m.loss(v, t)


@case(
    ["down1 down2", "middle", "up2 up1"],
    "down1: 0→2, down2: 0→1, down2: 0→2, middle: 1→2",
    "down1 down2 middle",
    "up2 up1",
)
def unet(m: Any, x: Any) -> Any:
    d1 = m.down1(x)
    d2 = m.down2(d1)
    middle = b(m.middle(b(d2)))
    return m.up1(m.up2(middle, d2), d1)


@case(["encoder", "embedding dec1", "dec2"], "encoder: 0→1, encoder: 0→2, dec1: 1→2", "encoder embedding", "dec1 dec2")
def encoder_decoder(m: Any, source: Any, target: Any) -> Any:
    memory = b(m.encoder(source))
    y = b(m.dec1(m.embedding(target), memory))
    return m.dec2(y, memory)


@case(["trunk f g", "head1", "head2"], "f: 0→1, g: 0→2, head1: 1→2", "trunk f g head1 head2")
def two_heads(m: Any, x: Any) -> Any:
    h = m.trunk(x)
    a = b(m.f(h))
    c = b(m.g(h))
    return m.head1(a), m.head2(c)


@case(["trunk f g", "head1 head2 loss"], "f: 0→1, g: 0→1", "trunk f g head1 head2", "loss")
def two_heads_that_meet(m: Any, x: Any) -> Any:
    h = m.trunk(x)
    a = b(m.f(h))
    c = b(m.g(h))
    return m.loss(m.head1(a), m.head2(c))


@case(["trunk", "f", "g", "loss"], "trunk: 0→1, trunk: 0→2, f: 1→3, g: 2→3", "trunk f g", "loss")
def diamond(m: Any, x: Any) -> Any:
    h = b(m.trunk(x))
    a = b(m.f(h))
    c = b(m.g(h))
    return m.loss(a, c)


@case(["rand_like add a", "sub c"], "rand_like: 0→1, a: 0→1", "a c")
def noise_in_two_stages(m: Any, x: Any) -> Any:
    noise = torch.rand_like(x)
    h = b(m.a(x + noise))
    return m.c(h - noise)


@case(["a main", "side join"], "a: 0→1, main: 0→1", "a side main", "join")
def side_path(m: Any, x: Any) -> Any:
    h = m.a(x)
    side = m.side(h)
    return m.join(b(m.main(h)), side)


@case(["a", "d", "c j", "e k"], "a: 0→2, a: 0→3, d: 1→2, d: 1→3, j: 2→3", "a d c e", "j k")
def two_that_wait_for_each_other(m: Any, x: Any, y: Any) -> Any:
    p, q = m.a(x), m.d(y)
    j = m.j(q, m.c(b(p)))
    k = m.k(p, m.e(b(q)))
    return j, k


@case(["a", "c"], "a: 0→1", "a c")
def boundary_behind_a_boundary(m: Any, x: Any) -> Any:
    return m.c(b(b(m.a(x))))


@case(["a"], "", "a")
def result_through_a_boundary(m: Any, x: Any) -> Any:
    return b(m.a(x))


@case(["a", "c", "d"], "a: 0→1, a: 0→2, c: 1→2", "a c d")
def output_of_several_stages(m: Any, x: Any) -> Any:
    h = m.a(x)
    y = b(m.c(b(h)))
    return {"first": h, "last": (m.d(y), y)}


@case(["frozen", "c d"], "frozen: 0→1", "c", "d", frozen)
def frozen_encoder(m: Any, x: Any) -> Any:
    h = m.frozen(x)
    return m.d(m.c(b(h)), h)


@case(["a", "t", "loss"], "a: 0→2, t: 1→2", "a t", "loss")
def mask_in_both_towers(m: Any, img: Any, txt: Any) -> Any:
    mask = (img > 0).float()
    v = b(m.a(img * mask))
    t = b(m.t(txt * mask))
    return m.loss(v, t)


@case(["a", "c mul"], "a: 0→1", "a c")
def mask_that_crosses(m: Any, x: Any) -> Any:
    h, mask = b((m.a(x), x > 0))
    return m.c(h) * mask.float()


@case(["a f", "mul", "c"], "a: 0→1, f: 0→2, mul: 1→2", "a f c")
def only_the_mask_is_behind(m: Any, x: Any) -> Any:
    h = m.a(x)
    y, mask = b((m.f(h), x > 0))
    return h * mask, m.c(y)


@case(["a mul", "c truediv"], "mul: 0→1", "a c", "", scale)
def scale_computed_once(m: Any, x: Any) -> Any:
    scale = m.scale.exp()
    h = b(m.a(x) * scale)
    return m.c(h) / scale


@case(["zeros_like setitem_written mul a mul_1 t", "loss"], "a: 0→1, t: 0→1", "a t", "loss")
def mask_written_in_place_in_two_towers(m: Any, img: Any, txt: Any) -> Any:
    mask = torch.zeros_like(img)
    mask[:, 0] = 1
    v = b(m.a(img * mask))
    t = b(m.t(txt * mask))
    return m.loss(v, t)


def input_written_in_place(m: Any, x: Any) -> Any:
    x.mul_(2)
    return m.c(b(m.a(x)) + x)


@case(["a", "add_ c"], "a: 0→1", "a c")
def write_behind_a_boundary(m: Any, x: Any) -> Any:
    h = m.a(x)
    v = b(h)
    v.add_(1)
    return m.c(v)


def buffer_written_and_read_behind(m: Any, x: Any) -> Any:
    h = m.a(x)
    m.seen.add_(h.detach().mean())
    return m.c(b(h)) * m.seen


def weight_clamped_in_place(m: Any, x: Any) -> Any:
    h = b(m.a(x))
    m.c.weight.data.clamp_(-0.1, 0.1)
    return m.c(h)


@case(["a getattr_1 getitem_1", "c", "d mul"], "a: 0→1, getitem_1: 0→2, c: 1→2", "a c d")
def shape_behind_it_in_a_third_stage(m: Any, x: Any) -> Any:
    v = b(m.a(x))
    n = v.shape[0]
    y = b(m.c(v))
    return m.d(y) * n


def shape_asked_of_both_branches(m: Any, x: Any) -> Any:
    h = b(m.trunk(x))
    rows, columns = h.shape
    a = b(m.f(h) * (rows * columns))
    c = b(m.g(h) * rows)
    return m.loss(a, c)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.forward.__name__)
def test_each_node_is_in_the_stage_that_the_contract_says(case: Case) -> None:
    model = net(case.forward, case.one, case.two, **case.parts())
    program = partitioned(model)
    assert stages_of(program) == case.stages
    assert edges_of(passes.split(program)) == set(filter(None, case.edges.split(", ")))
    assert_same_result(model, program)


def test_the_exponential_of_a_scale_is_computed_by_both_its_owners() -> None:
    first, last = passes.split(partitioned(net(scale_computed_once, "a c", **scale())))
    assert set(first.parameters) == {"a.weight", "a.bias", "scale"}
    assert set(last.parameters) == {"c.weight", "c.bias", "scale"}
    assert first.parameters["scale"] is last.parameters["scale"]


def test_a_shape_asked_in_two_branches_does_not_join_them() -> None:
    program = partitioned(net(shape_asked_of_both_branches, "trunk f g", "loss"))
    trunk, left, right, loss = stages_of(program)
    assert trunk.split()[0] == "trunk"
    assert left == "f mul_1"
    assert right == "g mul_2"
    assert loss == "loss"
    assert_same_result(net(shape_asked_of_both_branches, "trunk f g", "loss"), program)


def test_an_input_written_in_place_is_written_in_a_copy() -> None:
    model = net(input_written_in_place, "a c")
    program = partitioned(model)
    assert stages_of(program) == ["mul_ a", "add c"]
    x = torch.ones(3, 4)
    found = run_stages(passes.split(program), {"x": x})
    assert torch.equal(x, torch.ones(3, 4))
    assert torch.equal(found, model(x))


def test_whatever_uses_a_buffer_that_is_written_is_in_one_stage() -> None:
    model = net(buffer_written_and_read_behind, "a c", seen=torch.zeros(()))
    program = partitioned(model)
    _, last = stages_of(program)
    assert last.split()[-3:] == ["add_", "c", "mul"]
    found = run_stages(passes.split(program), {"x": torch.ones(3, 4)})
    model.get_buffer("seen").zero_()
    assert torch.equal(found, model(torch.ones(3, 4)))


def buffer_sent_and_read(m: Any, x: Any) -> Any:
    h = m.a(x) * m.seen.add_(1)
    return m.c(b(h)) * m.seen


def test_the_next_micro_batch_does_not_change_what_this_one_read_of_a_buffer() -> None:
    model = net(buffer_sent_and_read, "a c", seen=torch.zeros(()))
    first, last = passes.split(partitioned(model))
    x = torch.ones(3, 4)
    arrived = [first.forward(x)[0] for _ in range(3)]  # three in flight, as a schedule has them
    found = [last.forward(*outputs)[0][0] for outputs in arrived]
    model.get_buffer("seen").zero_()
    for result in found:
        assert torch.equal(result, model(x))


def test_a_backward_sees_a_buffer_as_it_was_in_its_forward() -> None:
    model = net(buffer_sent_and_read, "a c", seen=torch.zeros(()))
    first, _ = passes.split(partitioned(model))
    x = torch.ones(3, 4)
    saved = [first.forward(x) for _ in range(2)]
    for outputs, kept in saved:
        first.backward(kept, [torch.ones_like(o) if o.requires_grad else None for o in outputs])
    found = model.a.bias.grad.clone()
    model.get_buffer("seen").zero_()
    model.a.bias.grad = None
    for _ in range(2):
        (model.a(x) * model.seen.add_(1)).sum().backward()
    assert torch.equal(found, model.a.bias.grad)


def test_a_module_stays_with_the_write_to_its_weight() -> None:
    model = net(weight_clamped_in_place, "a c")
    program = partitioned(model)
    assert stages_of(program) == ["a", "getattr_1 clamp_ c"]
    assert_same_result(model, program)


def batch_norm_twice_in_a_stage(m: Any, x: Any) -> Any:
    return m.c(b(m.norm(m.a(m.norm(x)))))


def batch_norm_in_two_towers(m: Any, x: Any, y: Any) -> Any:
    return m.loss(b(m.a(m.norm(x))), b(m.c(m.norm(y))))


@pytest.mark.parametrize(
    ("forward", "stages"),
    [
        (batch_norm_twice_in_a_stage, ["norm a norm", "c"]),
        (batch_norm_in_two_towers, ["norm a norm c", "loss"]),
    ],
)
def test_all_calls_of_a_module_with_running_statistics_are_in_one_stage(
    forward: Callable[..., Any], stages: list[str]
) -> None:
    assert stages_of(partitioned(net(forward, "a c", "loss", norm=nn.BatchNorm1d(4)))) == stages


# What cannot be cut, and says so.


@refused("must run in one stage", "norm")
def batch_norm_on_both_sides(m: Any, x: Any) -> Any:
    return m.c(m.norm(b(m.a(m.norm(x)))))


@refused("must run in one stage", "m.seen.add_(y.mean())")
def buffer_read_in_front_and_written_behind(m: Any, x: Any) -> Any:
    h = m.a(x * m.seen)
    y = m.c(b(h))
    m.seen.add_(y.mean())
    return y


@refused("reads the old value afterwards", "v.add_(1)")
def old_value_read_after_the_write(m: Any, x: Any) -> Any:
    h = m.a(x)
    v = b(h)
    v.add_(1)
    return m.c(v) + h


@refused("as it was before", "h.add_(1)")
def read_elsewhere_before_a_write(m: Any, x: Any) -> Any:
    h = m.a(x)
    y = m.c(b(h))
    h.add_(1)
    return y, h.sum()


@refused("depend on inputs alone", "b(x > 0)")
def mask_alone(m: Any, x: Any) -> Any:
    return m.a(x) * b(x > 0)


@refused("parameters alone", "b(m.scale.exp())")
def parameters_alone(m: Any, x: Any) -> Any:
    return m.a(x) * b(m.scale.exp())


@refused("register it as a buffer", "total += m.a(x).sum()")
def made_while_tracing_and_written(m: Any, x: Any) -> Any:
    total = torch.zeros(())
    total += m.a(x).sum()
    return total


@refused("writes scale behind a stage boundary", "s.mul_(0.5)")
def parameter_written_behind_a_boundary(m: Any, x: Any) -> Any:
    h, s = b((m.a(x), m.scale))
    s.mul_(0.5)
    return m.c(h) * s


@refused("reads the input x in another stage", "flat.mul_(2)")
def input_read_elsewhere_after_a_write_by_another_name(m: Any, x: Any) -> Any:
    flat = x.view(-1)
    flat.mul_(2)
    return m.c(b(m.a(flat.view(-1, 4)))) + x


@pytest.mark.parametrize(("forward", "fact", "line"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_no_cut_can_keep_right_is_refused_with_the_users_line(
    forward: Callable[..., Any], fact: str, line: str
) -> None:
    model = net(forward, "a c d", norm=nn.BatchNorm1d(4), seen=torch.ones(()), **scale())
    with pytest.raises(PartitionError) as caught:
        partitioned(model)
    assert fact in str(caught.value)
    assert __file__ in str(caught.value)
    assert line in str(caught.value)


def test_a_model_without_anything_to_train_or_to_cut_is_refused() -> None:
    with pytest.raises(PartitionError, match="output depends on inputs alone"):
        passes.split(partitioned(net(lambda m, x: F.relu(x))))


@pytest.mark.parametrize("writes", every(2, [True, False]))
def test_four_times_as_many_nodes_are_cut_with_four_times_the_work(writes: bool) -> None:
    def cut(program: Program) -> None:
        assert len(passes.split(chain(passes.default(), program))) == 16

    few, many = long_chain(250, 16, writes), long_chain(1000, 16, writes)
    assert steps(cut, many) <= 4.5 * steps(cut, few)


def long_chain(nodes: int, stages: int, writes: bool) -> Program:
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(()))
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    for place in range(nodes):
        if place in {nodes * stage // stages for stage in range(1, stages)}:
            x = graph.call_function(operator.getitem, (graph.call_function(boundary, ([x], None)), 0))
        x = graph.call_method("add_", (x, 1)) if writes and place % 3 else graph.call_function(torch.mul, (x, w))
    graph.output(x)
    return Program(module, graph)


# Names.


def two_names_on_one_cut(m: Any, x: Any) -> Any:
    return m.c(b(b(m.a(x), name="one"), name="two"))


def numbered_without_collision(m: Any, x: Any) -> Any:
    h = b(m.trunk(x), name="head")
    return m.d(b(m.meet(b(m.f(h)), b(m.g(h))), name="head_2"))


def first_submodule_of_several(m: Any, x: Any) -> Any:
    return m.blocks[1](b(m.blocks[0](x)))


@pytest.mark.parametrize(
    ("forward", "one", "two", "names"),
    [
        (two_towers, "a t", "loss", ["a", "t", "loss"]),
        (two_names_on_one_cut, "a c", "", ["a", "one"]),
        (numbered_without_collision, "trunk f g d", "meet", ["trunk", "head", "head_3", "meet", "head_2"]),
        (first_submodule_of_several, "", "", ["blocks.0", "blocks.1"]),
    ],
)
def test_a_stage_is_called_after_the_boundary_that_opens_it_or_its_first_submodule(
    forward: Callable[..., Any], one: str, two: str, names: list[str]
) -> None:
    model = net(forward, one, two, blocks=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    assert list(partitioned(model).stage_names) == names
