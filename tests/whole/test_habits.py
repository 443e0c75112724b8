"""Habits of real models: Python values as inputs, types that forward asks for, sizes by value, counters and caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import fxpipe
from fxpipe import RunError, TraceError, stage_boundary
from tests.device import DEVICE
from tests.harness import assert_same
from tests.layered import assert_trains, vectors
from tests.models import Inputs, Layers
from tests.replicas import refusals
from tests.strict_transport import run_strict
from tests.thinned import in_turn
from tests.two_ranks import TWO, WIDTH

every_tracer = pytest.mark.parametrize("tracer", ["export", "record"])


class Scaled(Layers):
    names, width = "a c", 4

    def forward(self, x: Tensor, how: Any) -> Tensor:
        h = stage_boundary(self.a(x))
        return (self.c(h) * _factor(how["by"])).square().mean()


def _factor(by: Any) -> float:
    if isinstance(by, torch.dtype):
        return float(by.itemsize)
    return 3.0 if isinstance(by, bool) else 0.5 if isinstance(by, float) else 1.0


@pytest.mark.parametrize(
    ("values", "tracer"),
    [((2, 2.0), "export"), ((True, 1), "record"), ((torch.float64, torch.float16), "export"), ((0.0, -0.0), "record")],
)
def test_python_values_that_compare_equal_are_kinds_of_their_own(values: tuple[Any, Any], tracer: str) -> None:
    model, x = Scaled(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(
        model, TWO, microbatches=1, tracer=tracer, example_args=(x,), example_kwargs={"how": {"by": values[0]}}
    )
    for value in (*values, *values):
        assert_same(forward_backward(x, how={"by": value}), plain(x, {"by": value}).detach(), f"loss for {value!r}")


class Norm(Layers):
    """As in many language models: computes in float32, and goes back to the type that it was given."""

    names, width = "a c", 8

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(self.a(x))
        kind = h.dtype
        h = h.float()
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(kind)
        return self.c(h).float().square().mean()


@every_tracer
def test_types_that_forward_asks_for_are_those_of_precision(tracer: str) -> None:
    model, x = Norm(), torch.randn(6, 8)
    plain = copy.deepcopy(model).to(torch.bfloat16)
    forward_backward = fxpipe.compile(
        model, TWO, microbatches=2, tracer=tracer, example_args=(x,), precision=fxpipe.Precision()
    )
    for rows in (6, 5):
        parts = x[:rows].to(torch.bfloat16).tensor_split(2)
        wanted = sum(plain(part).detach() * (len(part) / rows) for part in parts)
        assert_same(forward_backward(x[:rows]), wanted, "loss")
    assert forward_backward.evaluate(x).dtype == torch.float32


def batches() -> list[Inputs]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4, 4)} for _ in range(2)]


class Watched(Layers):
    """A value on its way to the next stage is read last inside of a region without gradients."""

    names, width = "a c", 4

    def forward(self, x: Tensor) -> Tensor:
        turned = self.a(x).T  # which the symbolic tracer records where it is first used
        with torch.no_grad():
            t = torch.sigmoid(turned)
        h, t = stage_boundary((turned, t))
        return (self.c(h.T) * t.T).square().mean()


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_a_value_that_is_handed_off_amid_no_grad_keeps_its_gradient(tracer: str) -> None:
    assert_trains(Watched, batches(), tracer=tracer, microbatches=1)


class Teacher(Layers):
    """Its layer is called with another one's parameters."""

    names, width = "a t", 4

    def forward(self, x: Tensor) -> Tensor:
        h = torch.func.functional_call(self.a, dict(self.t.named_parameters()), (x,))
        return self.a(stage_boundary(h)).square().mean()


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_a_module_called_with_other_parameters_uses_those(tracer: str) -> None:
    assert_trains(Teacher, batches(), tolerance=1e-6, tracer=tracer)
    with pytest.raises(TraceError, match="other parameters or buffers than its own"):
        fxpipe.compile(Teacher(), TWO, microbatches=1, tracer="symbolic")


def test_a_layer_without_a_shape_is_refused_with_what_to_do() -> None:
    with pytest.raises(RunError, match=r"0\.weight has no shape yet; call the model once"):
        fxpipe.compile(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), TWO, loss_fn=F.mse_loss, boundaries=["1"])


# --- sizes that depend on values, and values that are written in place ---


class Selects(nn.Module):
    """A submodule whose result has as many rows as its numbers say."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, h: Tensor, n: Tensor) -> Tensor:
        return self.how(self.layer(h), n)


class Selecting(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.chosen, self.c = nn.Linear(4, 4), Selects(how), nn.Linear(4, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.chosen(stage_boundary(torch.tanh(self.a(x))), n)
        return self.c(h).square().sum() / h.shape[0]


@pytest.mark.parametrize(
    "how",
    [
        lambda h, n: h.repeat_interleave(n, 0),
        lambda h, n: h[h[:, 0] > 1],
        lambda h, n: torch.cat([h, torch.stack([h[0]] * int(n.max()))]) if int(n.max()) else h,
    ],
    ids=["repeated", "above", "padded to the most"],
)
def test_a_size_that_depends_on_values_is_refused(how: Callable[[Tensor, Tensor], Tensor]) -> None:
    batch = (torch.randn(64, 4), torch.randint(1, 5, (64,)))
    # a rehearsal on a GPU makes up no integers but 0, and the check of the capture finds what depends on them
    found = "looks at the values of a tensor" + "|where the model runs, they fail" * (DEVICE == "cuda")
    with pytest.raises(TraceError, match=found):
        fxpipe.compile(Selecting(how), TWO, tracer="record", microbatches=2, example_args=batch)


def test_a_size_that_only_rare_values_change_is_an_error_when_it_changes() -> None:
    """No made-up number shows it."""
    x, n = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)

    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = Selecting(lambda h, n: h[n < 1000])
        forward_backward = fxpipe.compile(model, TWO, tracer="record", microbatches=2, example_args=(x, n))
        forward_backward(x, n)
        forward_backward(x, torch.tensor([0, 0, 2000, 0] * 2))

    told = r"chosen returned tensors of shapes \(3, 4\), but was captured with \(4, 4\)"
    with pytest.raises(fxpipe.RunError, match=told):
        run_strict(run, 2, 1)


class Statistics(nn.Module):
    """Uses a statistic that each micro-batch's batch norm writes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.one(x))
        return self.two(stage_boundary(self.scaled(h))).square().mean()

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.norm.running_var


class StatisticsInPlace(Statistics):
    def scaled(self, h: Tensor) -> Tensor:
        return h.mul_(self.norm.running_var.view(1, WIDTH))


@pytest.mark.parametrize(("tracer", "kind"), in_turn(list(fxpipe.TRACERS), [Statistics, StatisticsInPlace]))
def test_a_backward_sees_a_statistic_as_its_own_micro_batch_did(kind: type[nn.Module], tracer: str) -> None:
    torch.manual_seed(1)
    given = [{"x": torch.randn(8, WIDTH)} for _ in range(2)]
    assert_trains(kind, given, tracer=fxpipe.Tracing(tracer, check=False), microbatches=4)


# --- what placing stages leaves as it is; inputs that no rank can cut, or be sent ---


class Remembers(nn.Module):
    """Kept whole under ``record``: a counter, a cache, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.cache, self.seen = nn.Linear(WIDTH, WIDTH), 0, {}, []  # type: ignore[var-annotated]

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        if len(h) not in self.cache:
            self.cache[len(h)] = torch.arange(float(len(h))).unsqueeze(1)
        return (self.layer(h) + self.cache[len(h)]) * self.calls * sum(self.seen)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        found: Tensor = self.layer(h)[0]
        return found


class Three(nn.Module):
    """Three stages, of which a rank of two has more than one."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.part(stage_boundary(torch.tanh(self.a(x))))
        return F.mse_loss(self.b(stage_boundary(h)), y)


def test_placing_stages_leaves_counters_and_caches_as_they_are() -> None:
    assert_trains(lambda: Three(Remembers()), [vectors(5), vectors(5)], tolerance=1e-6, tracer="record")


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_placing_stages_leaves_no_tensor_without_numbers_in_the_model(tracer: str) -> None:
    model = Three(Recurrent())
    batch = {name: torch.randn(8, WIDTH) for name in ("x", "y")}
    forward_backward = fxpipe.compile(model, TWO, microbatches=2, tracer=tracer, example_kwargs=batch)
    assert "checked against the model" in str(forward_backward.stages)
    copy.deepcopy(model)(**batch)


def test_a_sparse_input_is_refused_on_all_ranks_alike() -> None:
    def body(rank: int) -> None:
        x, y = torch.ones(4, WIDTH), torch.ones(4, WIDTH)
        step = fxpipe.compile(Three(nn.Identity()), TWO, microbatches=2)
        with pytest.raises(fxpipe.RunError, match=r"an input is a tensor of layout torch.sparse_coo, which"):
            step(x, y.to_sparse() if rank else None)
        step(x, y)

    run_strict(body, 2)


class Vocabulary:
    """An object of a user's own, which no other rank can be sent."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class WithVocabulary(Layers):
    names, width = "one two", 4

    def forward(self, x: Tensor, vocabulary: Any) -> Tensor:
        return (self.two(stage_boundary(self.one(x))) * vocabulary.scale).square().mean()


def with_vocabulary(given: bool, tracer: str = "symbolic") -> Tensor:
    torch.manual_seed(0)
    example: Any = {} if tracer == "symbolic" else {"example_args": (torch.ones(4, 4), Vocabulary(3.0))}
    forward_backward = fxpipe.compile(WithVocabulary(), TWO, tracer=tracer, **example)
    assert tracer == "symbolic" or "vocabulary" in forward_backward.required_inputs
    return forward_backward(torch.ones(8, 4), Vocabulary(3.0) if given else None)


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_an_object_is_what_each_rank_has(tracer: str) -> None:
    wanted = WithVocabulary()(torch.ones(8, 4), Vocabulary(3.0)).detach()
    for loss in run_strict(lambda rank: with_vocabulary(True, tracer), 2):
        torch.testing.assert_close(loss, wanted)


def test_an_object_that_one_rank_was_not_given_is_refused_on_all_ranks() -> None:
    for error in refusals(lambda rank: with_vocabulary(rank == 1), 2):
        assert "input 'vocabulary' is or holds " in error
        assert "this rank was given None; pass it on all ranks of a pipe group" in error


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Wrapped(nn.Module):
    """Its blocks are wrapped as ``apply_activation_checkpointing`` does, which leaves a part out of names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        apply_activation_checkpointing(self, check_fn=lambda part: isinstance(part, Block))

    def forward(self, x: Tensor) -> Tensor:
        return (self.blocks(x) - x).square().mean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_in_checkpoint_wrappers_is_trained_saved_and_loaded(ranks: int, tmp_path: Path) -> None:
    x, plain = torch.randn(8, 4), Wrapped()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        (loss := torch.stack([plain(part) for part in x.chunk(2)]).mean()).backward()
        optimizer.step()
        wanted.append(loss.detach())

    def run(rank: int) -> None:
        losses, state = [], Wrapped().state_dict()
        for step in range(3):  # each by another one, resumed
            options: Any = {"boundaries": ["blocks.1"], "microbatches": 2, "example_args": (x,)}
            forward_backward = fxpipe.compile(Wrapped(), TWO, **options)
            steps = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
            fxpipe.load(tmp_path, forward_backward, steps, required=step > 0)
            forward_backward.load_state_dict(state)
            losses.append(forward_backward(x))
            steps.step()
            fxpipe.save(tmp_path, forward_backward, steps, step=step + 1)
            state = forward_backward.state_dict(full=True)
        torch.testing.assert_close(losses, wanted)
        torch.testing.assert_close(state, plain.state_dict())

    run_strict(run, 2) if ranks == 2 else run(0)
