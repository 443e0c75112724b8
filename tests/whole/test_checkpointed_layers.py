"""Checkpointed layers: in a stage, each layer keeps only its inputs, and nothing that anybody sees is another."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.activations import counted
from tests.harness import Engines, assert_same

WIDTH, WIDE, ROWS, MICROBATCHES, LAYERS = 8, 32, 16, 4, 6


class Layer(nn.Module):
    """Without dropout autograd keeps x, what GELU takes and what it makes."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return x + self.norm(self.drop(y) if self.drop.p else y)


class Stack(nn.Module):
    """``cut``: the layers in front of which a stage begins."""

    def __init__(self, *cut: int, layers: int = LAYERS, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(layers))
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(stage_boundary(x, name=f"from{number}") if number in self.cut else x)
        return x.square().mean()


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))}


def compiled(model: nn.Module, ranks: int = 2, tracer: str = "record", **options: Any) -> fxpipe.ForwardBackward:
    options = {"microbatches": MICROBATCHES, "example_kwargs": batch()} | options
    return fxpipe.compile(model, Topology([("pipe", ranks)]), tracer=tracer, **options)


def stepped(model: nn.Module, ranks: int = 2, **options: Any) -> list[Tensor | None]:
    """Losses, gradients and buffers of two steps."""
    forward_backward = compiled(model, ranks, **options)
    torch.manual_seed(2)
    losses = [forward_backward(**batch()) for _ in range(2)]
    gradients = [parameter.grad for parameter in forward_backward.parameters()]
    return [*losses, *gradients, *(buffer.clone() for buffer in forward_backward.module.buffers())]


def assert_equal(got: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert_same(one, other, "with and without checkpointed layers")


# --- losses and gradients ---


@pytest.mark.parametrize("tracer", fxpipe.TRACERS)
@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}, {"norm": True, "dropout": 0.2}], ids=str)
def test_losses_gradients_and_statistics_are_those_without(tracer: str, options: dict[str, Any]) -> None:
    run = partial(stepped, tracer=tracer)
    assert_equal(run(Stack(3, **options), recompute="layers"), run(Stack(3, **options)))


def test_they_are_those_of_plain_pytorch() -> None:
    model, plain = Stack(3), Stack()
    got = stepped(model, recompute="layers")
    for _ in range(2):
        for part in batch()["x"].chunk(MICROBATCHES):
            (plain(part) / MICROBATCHES).backward()
    for parameter, own in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(parameter.grad, own.grad, "a gradient")
    assert len(got) == 2 + len(list(plain.parameters()))


def trained(dropout: float, options: dict[str, Any]) -> list[Tensor | None]:
    """On this rank: the losses, and the gradients of its parameters by the model's order."""
    forward_backward = compiled(Stack(3, dropout=dropout), **options)
    torch.manual_seed(2)
    losses = [forward_backward(**batch()) for _ in range(2)]
    return [*losses, *(parameter.grad for parameter in forward_backward.parameters())]


@pytest.mark.parametrize("options", [{}, {"schedule": "zb_h1"}, {"schedule": "gpipe"}], ids=str)
@pytest.mark.parametrize("engine", ["strict 1", pytest.param("distributed", marks=pytest.mark.processes)])
def test_on_two_ranks_too(engine: str, options: dict[str, Any], engines: Engines) -> None:
    got, wanted = (
        engines(engine)(2, partial(trained, 0.2, {**options, "recompute": recompute}))
        for recompute in ("layers", False)
    )
    for one, other in zip(got, wanted, strict=True):
        assert_equal(one, other)


# --- bytes ---

MICRO = ROWS // MICROBATCHES
INPUT = 4 * MICRO * WIDTH
"""What a checkpointed layer keeps of a micro-batch."""
INSIDE = 2 * 4 * MICRO * WIDE
"""What its backward holds beside: what GELU takes, and what it makes."""


def peak_of(model: nn.Module, ranks: int, stage: int = 0, **options: Any) -> int:
    """The most bytes that a stage keeps between actions and in its forwards."""
    forward_backward = compiled(model, ranks, **options)
    forward_backward(**(inputs := batch()))
    with counted(forward_backward, inputs) as seen:
        forward_backward(**inputs)
    return seen.peak[stage]


class Gelus(TorchDispatchMode):
    """How many results of GELU are in memory, at most."""

    now = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.gelu.default:
            self.now += 1
            self.most = max(self.most, self.now)
            weakref.finalize(result.untyped_storage(), self._freed)
        return result

    def _freed(self) -> None:
        self.now -= 1


def gelus(model: nn.Module, ranks: int, **options: Any) -> int:
    forward_backward = compiled(model, ranks, **options)
    with Gelus() as seen:
        forward_backward(**batch())
    return seen.most


def activations(model: nn.Module, ranks: int, tracer: str = "record", **options: Any) -> float:
    """The bytes of the first rank's activations, according to the preview."""
    options = {"microbatches": MICROBATCHES, "example_kwargs": batch()} | options
    preview = fxpipe.preview(model, Topology([("pipe", ranks)]), tracer=tracer, **options)
    assert preview.ranks[0].activations is not None
    return preview.ranks[0].activations


@pytest.mark.parametrize("tracer", fxpipe.TRACERS)
def test_a_stage_keeps_the_inputs_of_its_layers_and_in_backward_one_layer_whole(tracer: str) -> None:
    """GPipe: the second stage, of 6 layers, holds 4 micro-batches. The loss keeps the argument of the square."""
    options: dict[str, Any] = {"schedule": "gpipe", "tracer": tracer}
    assert peak_of(Stack(2, layers=8), 2, 1, **options) == MICROBATCHES * (7 * INPUT + 6 * INSIDE)
    assert peak_of(Stack(2, layers=8), 2, 1, recompute="layers", **options) == MICROBATCHES * 7 * INPUT
    assert gelus(Stack(layers=8), 1, **options) == MICROBATCHES * 8
    assert gelus(Stack(layers=8), 1, recompute="layers", **options) == 1


@pytest.mark.parametrize("tracer", fxpipe.TRACERS)
def test_the_preview_counts_what_is_held(tracer: str) -> None:
    """One rank with one micro-batch at a time keeps the inputs of all layers but the first, which is the batch, and the
    argument of the square. In the last layer's backward, one layer is in place of this argument."""
    previewed, without = (activations(Stack(), 1, tracer=tracer, recompute=each) for each in ("layers", False))
    assert without == LAYERS * (INPUT + INSIDE)
    assert previewed == (LAYERS - 1) * INPUT + INSIDE
    assert peak_of(Stack(), 1, tracer=tracer, recompute="layers") == LAYERS * INPUT


def test_the_backward_of_a_layer_takes_another_forward_and_leaves_nothing_to_w() -> None:
    plain, again = (
        fxpipe.preview(
            Stack(3),
            Topology([("pipe", 2)]),
            microbatches=MICROBATCHES,
            example_kwargs=batch(),
            tracer="export",
            schedule="zb_h1",
            recompute=recompute,
        ).timeline.costs
        for recompute in (False, "layers")
    )
    assert again.forward == pytest.approx(plain.forward)
    assert again.backward[0] == pytest.approx(plain.backward[0] + plain.forward[0])
    assert again.weight[0] == 0 < plain.weight[0]


# --- "auto" ---

STATE = 16 * (2 * WIDTH * WIDE + WIDTH + WIDE)
"""A layer's parameters, gradients and two moments."""


def auto(memory: float) -> dict[str, Any]:
    return {"recompute": "auto", "hardware": fxpipe.Hardware(memory=memory), "tracer": "export"}


def test_auto_checkpoints_the_layers_of_stages_that_fit_in_no_other_way() -> None:
    """One micro-batch is in flight at a time, so a whole stage, made again, takes as much as one that is kept."""
    by_layers = LAYERS * STATE + (LAYERS - 1) * INPUT + INSIDE + batch()["x"].nbytes
    (told,) = described(Stack(), ranks=1, **auto(by_layers))
    assert told == "checkpointed: layers.0 to 5"
    assert_equal(stepped(Stack(), 1, **auto(by_layers)), stepped(Stack(), 1, tracer="export"))
    with pytest.raises(fxpipe.PartitionError, match="recomputed or recomputed by layers"):
        compiled(Stack(), 1, **auto(by_layers - 2 * INPUT))
    assert described(Stack(), ranks=1, **auto(by_layers + LAYERS * INSIDE)) == []


def test_only_stages_that_need_it_checkpoint_their_layers() -> None:
    """The second stage, of 5 layers, has one micro-batch in flight in 1F1B, and the first, of one layer, has two."""
    options = auto(5 * STATE + 5 * INPUT + 3 * INSIDE)
    assert described(Stack(1), **options) == ["checkpointed: layers.1 to 5"]
    assert_equal(stepped(Stack(1, dropout=0.2), **options), stepped(Stack(1, dropout=0.2), tracer="export"))


def test_later_kinds_of_batch_and_other_tables_checkpoint_the_same_layers() -> None:
    forward_backward = compiled(Stack(1), **auto(5 * STATE + 5 * INPUT + 3 * INSIDE))
    plain = compiled(Stack(1), tracer="export")
    forward_backward.record_timeline()
    for each in (forward_backward, plain):
        each(**batch())
    forward_backward.reschedule("greedy")
    for rows in (ROWS, 2 * ROWS, ROWS - 1):
        assert_same(forward_backward(**batch(rows)), plain(**batch(rows)), "a loss")
        assert_same(forward_backward.evaluate(**batch(rows)), plain.evaluate(**batch(rows)), "an evaluation")
        with Gelus() as seen:
            forward_backward(**batch(rows))
        assert seen.most == 3, "two micro-batches in the first stage's layer, and one layer of the second"
        plain(**batch(rows))
    for one, other in zip(forward_backward.parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad, "a gradient")


@pytest.mark.parametrize("boundaries", ["auto", ["layers.3", "layers.6"]], ids=str)
def test_a_search_for_stages_or_ranks_knows_that_layers_may_be_checkpointed(boundaries: Any) -> None:
    """One micro-batch, so a whole stage, made again, takes 9 inputs for each layer. A rank has six layers, in at most
    two stages: 27 inputs, or 6 + 8 by layers."""
    inputs = batch(1024)
    limit = auto(6 * STATE + 21 * inputs["x"].nbytes)
    options = {"boundaries": boundaries, "example_kwargs": inputs, "microbatches": 1, **limit}
    assert compiled(Stack(layers=2 * LAYERS), **options).stages.by_layers


# --- which layers ---


def described(model: nn.Module, **options: Any) -> list[str]:
    """The lines of the stages' table about recomputation."""
    lines = str(compiled(model, **options).stages).splitlines()
    return [line for line in lines if "checkpointed" in line or "recomputed" in line]


@pytest.mark.parametrize(
    ("recompute", "lines"),
    [
        ("layers", ["checkpointed: layers.0 to 5"]),
        (["layers.[12]", "layers.4.down"], ["checkpointed: layers.1 to 2, layers.4.down"]),
        (["from3"], ["recomputed: from3"]),
        (["from3", "layers.1"], ["recomputed: from3", "checkpointed: layers.1"]),
    ],
)
def test_names_are_of_stages_or_else_of_submodules(recompute: Any, lines: list[str]) -> None:
    options = {"recompute": recompute, "schedule": "gpipe"}
    assert described(Stack(3, dropout=0.1), **options) == lines
    run = partial(stepped, schedule="gpipe")
    assert_equal(run(Stack(3, dropout=0.1), recompute=recompute), run(Stack(3, dropout=0.1)))


def test_a_name_of_neither_is_refused() -> None:
    with pytest.raises(fxpipe.PartitionError, match=r"'layers\.9', which does not exist; did you mean"):
        compiled(Stack(3), recompute=["layers.9"])
    with pytest.raises(fxpipe.PartitionError, match="finds no layers"):
        compiled(Stack(layers=1), 1, recompute="layers")


@pytest.mark.parametrize("option", ["parallelize", "stage_compiler"])
def test_what_replaces_the_code_of_layers_is_refused(option: str) -> None:
    with pytest.raises(fxpipe.PartitionError, match=f"checkpoints layers, such as layers.0, and {option}="):
        compiled(Stack(3), recompute="layers", **{option: lambda *args: None})


class Odd(Layer):
    """A layer that counts its calls in a buffer, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_layer_that_changes_what_it_reads_stays_as_it_is() -> None:
    def model() -> Stack:
        stack = Stack(3)
        stack.layers[1], stack.layers[2] = Odd(), Odd()
        return stack

    (why, told) = described(model(), recompute=["layers.[1-5]"], tracer="export")
    assert (told, why.split(", since")[0]) == (
        "checkpointed: layers.3 to 5",
        "not checkpointed: layers.1 to 2",
    )
    assert_equal(stepped(model(), tracer="export", recompute=["layers.[1-5]"]), stepped(model(), tracer="export"))


class Shared(nn.Module):
    """A single layer that runs again and again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = self.group[0](x)
        return x.square().mean()


@pytest.mark.parametrize("tracer", fxpipe.TRACERS)
def test_each_call_of_a_layer_is_checkpointed_by_itself(tracer: str) -> None:
    assert peak_of(Shared(), 1, tracer=tracer, recompute="layers") == LAYERS * INPUT
    assert gelus(Shared(), 1, tracer=tracer, recompute="layers") == 1
    assert_equal(stepped(Shared(), 1, tracer=tracer, recompute="layers"), stepped(Shared(), 1, tracer=tracer))


class Encoder(nn.Module):
    """Its layers are inside of a submodule that record could keep as a single call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Stack())

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.encoder(x)


def test_layers_inside_of_a_submodule_are_found_by_every_tracer() -> None:
    for tracer in fxpipe.TRACERS:
        assert described(Encoder(), ranks=1, tracer=tracer, recompute="layers") == [
            "checkpointed: encoder.0.layers.0 to 5"
        ]


# --- beside other options ---


@pytest.mark.parametrize(
    "options",
    [
        {"boundaries": "auto"},
        {"offload": "auto", "hardware": fxpipe.Hardware(memory=40_000, host_link=1e9)},
        {"offload": True, "schedule": "gpipe", "hardware": fxpipe.Hardware(host_link=1e12)},
        {"zero": 3, "schedule": "gpipe"},
        {"precision": fxpipe.Precision()},
        {"microbatches": 3},
    ],
    ids=str,
)
def test_beside_other_options_nothing_changes(options: dict[str, Any]) -> None:
    model = partial(Stack, *(() if "boundaries" in options else (3,)), dropout=0.2)
    forward_backward = compiled(model(), recompute="layers", **options)
    if "boundaries" in options:
        options = {"boundaries": forward_backward.cuts}
    assert_equal(stepped(model(), recompute="layers", **options), stepped(model(), **options))


def test_evaluation_and_later_shapes_run_as_without() -> None:
    with_layers, plain = (compiled(Stack(3), recompute=recompute) for recompute in ("layers", False))
    for rows in (ROWS, 2 * ROWS, ROWS - 1):
        assert_same(with_layers(**batch(rows)), plain(**batch(rows)), "a loss")
        assert_same(with_layers.evaluate(**batch(rows)), plain.evaluate(**batch(rows)), "an evaluation")
    for one, other in zip(with_layers.parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad, "a gradient")
