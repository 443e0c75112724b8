"""Bugs of the data axis that once bit."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import replica_of
from tests.pool import Pool
from tests.strict_transport import run_strict
from tests.thinned import every, in_turn, pairwise

PAIR = Topology([("pipe", 1), ("data", 2)])
SQUARE = Topology([("pipe", 2), ("data", 2)])
every_zero = pytest.mark.parametrize("zero", [0, 1, 2], ids="zero={}".format)
sharded = pytest.mark.parametrize("zero", [1, 2], ids="zero={}".format)

Parts = dict[str, list[tuple[int, int, Tensor | None]]]
"""Name → (start, stop, what a rank has of the gradient)."""


def compiled_alone(module: nn.Module, topology: Topology, **options: Any) -> fxpipe.ForwardBackward:
    """One stage of its own for a module, and a loss behind it; ``total``: a Sum."""
    total = options.pop("total", False)

    def loss(y: Tensor) -> Any:
        return fxpipe.Sum(y.square().sum(), y.numel()) if total else y.square().mean()

    graph = fxpipe.StageGraph.from_callables({"module": module, "loss": loss}, [("module", "loss")], {"module": ["x"]})
    return fxpipe.compile(graph, topology, placement={"module": 0, "loss": 0}, **options)


def parts(step: fxpipe.ForwardBackward) -> Parts:
    """What this rank has of the summed gradients."""
    found: Parts = {}
    for piece in step._reducer.pieces():
        gradient = piece.gradient()
        kept = None if gradient is None else gradient.flatten().clone()
        found.setdefault(piece.name, []).append((piece.start, piece.stop, kept))
    return found


def assert_parts(ranks: Sequence[Parts], wanted: Mapping[str, Tensor | None], what: str = "") -> None:
    """Every rank's parts are those of the whole gradients."""
    assert {name for found in ranks for name in found} == wanted.keys()
    for rank, found in enumerate(ranks):
        for name, pieces in found.items():
            whole = wanted[name]
            for start, stop, gradient in pieces:
                if whole is None or gradient is None:
                    assert gradient is whole is None, f"{what}, rank {rank}: {name} has {gradient}, wanted {whole}"
                else:
                    torch.testing.assert_close(
                        gradient,
                        whole.flatten()[start:stop],
                        rtol=1e-4,
                        atol=1e-5,
                        msg=lambda text, name=name, rank=rank: f"{what}, rank {rank}: {name}\n{text}",
                    )


def gradients(model: nn.Module, prefix: str = "") -> dict[str, Tensor | None]:
    return {prefix + name: parameter.grad for name, parameter in model.named_parameters()}


def refusals(body: Callable[[int], object], ranks: int) -> list[str]:
    """What each rank of a strict world says as it refuses."""
    said = [""] * ranks

    def refused(rank: int) -> None:
        with pytest.raises(fxpipe.FxpipeError) as error:
            body(rank)
        said[rank] = f"{type(error.value).__name__}: {error.value}"

    with contextlib.suppress(fxpipe.FxpipeError):  # the strict world's own
        run_strict(refused, ranks)
    return said


def linear(width: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width, bias=False)


# --- what is not used, or has no weight, in calls without synchronisation ---


COUNT = 4  # parameters that data may use; the column behind theirs is a micro-batch's weight


class Choosing(nn.Module):
    """Uses the parameters that the data names."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes: list[tuple[int, ...]] = [(3,), (20,), (), (2, 5)]
        self.chosen = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
        self.always = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 0] * self.always
        for place, parameter in enumerate(self.chosen):
            if bool(x[:, 1 + place].any()):
                y = y + parameter.sum() * x[:, 0] * x[:, 1 + place]
        return y


class Again(nn.Module):
    """Uses them once more, those that the data names from the other end."""

    def __init__(self, first: Choosing) -> None:
        super().__init__()
        self.own = Choosing()
        self.own.chosen, self.own.always = nn.ParameterList(first.chosen), first.always

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value, uses, weight = x.split([1, COUNT, 1], 1)
        return y + self.own(torch.cat([value, uses.flip(1), weight], 1))


def choice(value: float, uses: Sequence[bool], weight: float) -> Tensor:
    """A micro-batch of one row."""
    return torch.tensor([[value, *map(float, uses), weight]])


def weight_of(x: Tensor) -> float:
    return float(x[0, 1 + COUNT])


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum() / 10


Move = tuple[str, Any]
"""("call" or "later", each replica's batch), ("clear" or "clear to zero", None) or ("drop", which parameter)."""


def accumulate(model: Choosing, batches: Sequence[Tensor], total: bool, tied: bool) -> None:
    """Plain PyTorch's gradients of all replicas' batches, row by row."""
    rows = [row for batch in batches for row in batch.split(1) if weight_of(row)]
    for row in rows:
        share = 1 / (3.0 * len(rows)) if total else weight_of(row) / sum(weight_of(row) for row in rows)
        y = model(row)
        (loss_of(Again(model)(row, y) if tied else y) * share).backward()


def walked(moves: Sequence[Move], topology: Topology, total: bool, tied: bool, seed: int, **options: Any) -> None:
    """After each synchronised call of the walk every rank has its part of what plain PyTorch has. ``tied``: two stages
    share the parameters."""

    def body(rank: int) -> list[Parts]:
        def loss(y: Tensor) -> Any:
            return fxpipe.Sum(loss_of(y), 3.0) if total else loss_of(y)

        first, last = Choosing(), topology.size("pipe") - 1
        if tied:
            stages: dict[str, Any] = {"module": first, "again": Again(first), "loss": loss}
            edges, inputs = [("module", "again"), ("again", "loss")], {"module": ["x"], "again": ["x"]}
        else:
            stages, edges, inputs = {"module": first, "loss": loss}, [("module", "loss")], {"module": ["x"]}
        graph = fxpipe.StageGraph.from_callables(stages, edges, inputs)
        placement = {name: 0 if name == "module" else last for name in stages}
        step = fxpipe.compile(graph, topology, placement=placement, loss_weight=weight_of, **options)
        replica = topology.coordinate(rank)["data"]
        seen = []
        for what, given in moves:
            if what.startswith("clear"):
                step.zero_grad(set_to_none=what == "clear")
            elif what == "drop":
                for name, parameter in step.named_parameters():
                    if name.endswith(f".chosen.{given}"):
                        parameter.grad = None
            else:
                step.set_requires_gradient_sync(what == "call")
                step(given[replica])
                if what == "call":
                    seen.append(
                        {
                            name.removeprefix("again.own.").removeprefix("module."): had
                            for name, had in parts(step).items()
                        }
                    )
        return seen

    every = run_strict(body, topology.world_size, seed)
    model, count = Choosing(), 0
    for place, (what, given) in enumerate(moves):
        if what.startswith("clear"):
            model.zero_grad(set_to_none=what == "clear" or options["zero"] > 0)
        elif what == "drop":
            model.chosen[given].grad = None
        else:
            accumulate(model, given, total, tied)
            if what == "call":
                names = [name for name, _ in moves[: place + 1]]
                assert_parts([seen[count] for seen in every], gradients(model), f"after {names}")
                count += 1


NONE, ALL, FIRST = [False] * COUNT, [True] * COUNT, [True] + [False] * (COUNT - 1)
SPOILED = {
    "a parameter unused": choice(2.0, FIRST, 1.0),
    "all of them unused": choice(2.0, NONE, 1.0),
    "no weight": choice(2.0, ALL, 0.0),
}


@pytest.mark.parametrize(
    ("total", "before", "victim", "zero", "spoiled"),
    every(4, list(product([False, True], [[], ["call"]], [0, 1], [0, 1, 2], SPOILED))),  # the victim by the last two
    ids=str,
)
def test_what_one_rank_has_not_used_in_an_unsynchronised_call_is_summed_in_the_next(
    zero: int, victim: int, spoiled: str, total: bool, before: list[str]
) -> None:
    full, quiet = choice(3.0, ALL, 1.0), choice(1.0, NONE, 1.0)
    unequal = [SPOILED[spoiled] if rank == victim else full for rank in range(2)]
    moves: list[Move] = [*((what, [full, full]) for what in before), ("later", unequal), ("call", [quiet, quiet])]
    walked(moves, PAIR, total, tied=False, seed=0, zero=zero, microbatches=1)


def random_walk(draw: random.Random, replicas: int, rows: int) -> list[Move]:
    def batch() -> Tensor:
        drawn = [
            choice(draw.choice([1.0, 2.0, 3.0]), [draw.random() < 0.4 for _ in ALL], draw.choice([0.0, 1.0, 1.0, 2.0]))
            for _ in range(rows)
        ]
        return torch.cat(drawn)

    moves: list[Move] = []
    for _ in range(8):
        what = draw.choice(["call", "call", "later", "later", "clear", "clear to zero", "drop"])
        given: Any = draw.randrange(COUNT) if what == "drop" else None
        moves.append((what, [batch() for _ in range(replicas)] if what in ("call", "later") else given))
    nobody = choice(1.0, NONE, 1.0).expand(rows, -1)  # so that what is there must be from earlier
    return [*moves, ("call", [nobody] * replicas)]


@pytest.mark.parametrize(
    ("zero", "total", "pipe", "seed"), pairwise([0, 1, 2], [False, True], [1, 2], every(5, range(10))), ids=str
)
def test_any_walk_of_calls_in_which_replicas_use_different_parameters_and_weights_of_zero(
    zero: int, total: bool, pipe: int, seed: int
) -> None:
    draw = random.Random(f"{zero} {total} {pipe} {seed}")
    replicas, per_node = draw.choice([(2, None), (4, 2), *([(2, 1), (3, None)] if pipe == 1 else [])])
    rows = draw.choice([1, 2])
    walked(
        random_walk(draw, replicas, rows),
        Topology([("pipe", pipe), ("data", replicas)], per_node),
        total,
        pipe == 2 or draw.random() < 0.3,
        seed,
        zero=zero,
        zero_scope=draw.choice(["node", "data"]),
        bucket_cap_mb=draw.choice([1e-6, 1e-4, 25.0]),
        microbatches=rows,
    )


# --- masters of optimizers that are made late ---


@pytest.mark.parametrize("zero", [0, 1], ids="zero={}".format)
@pytest.mark.parametrize("late", ["written", "loaded", "stepped"])
def test_masters_of_a_late_optimizer_are_the_parameters_present_values(zero: int, late: str) -> None:
    """Those before rounding where nothing has written the parameter since, or where they were loaded."""
    values = torch.randn(4, 4)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        module = nn.Sequential(linear(), linear())
        step = compiled_alone(module, PAIR, microbatches=1, zero=zero, precision=fxpipe.Precision())
        if late == "written":
            with torch.no_grad():
                step.module.get_parameter("module.0.weight").copy_(values)
        elif late == "loaded":
            state = {name: values.clone() for name in step.state_dict()}
            step.load_state_dict(state)
            for tensor in state.values():
                tensor.fill_(99.0)  # it is the user's
        else:
            first = step.optimizer(torch.optim.SGD, lr=1.0)
            step(torch.ones(2, 4))
            first.step()
            step.zero_grad()
        now = step.module.get_parameter("module.0.weight").detach().clone()
        optimizer = step.optimizer(torch.optim.SGD, lr=0.0)
        step(torch.ones(2, 4))
        optimizer.step()  # which writes masters back
        assert torch.equal(step.module.get_parameter("module.0.weight"), now)
        masters = torch.full((2, 16), torch.nan)
        for piece, target in ((target.piece, target) for target in optimizer._flat):
            masters[int(piece.name[7]), piece.start : piece.stop] = target.tensor.flatten()
        return now.flatten().float(), masters

    ranks = run_strict(body, 2)
    masters = ranks[0][1] if zero == 0 else ranks[0][1].where(~ranks[0][1].isnan(), ranks[1][1])
    now, original = ranks[0][0], linear().weight.detach().flatten()
    if late == "written":
        assert torch.equal(now, values.bfloat16().float().flatten())
        assert torch.equal(masters, torch.stack([now, original]))
    elif late == "loaded":
        assert torch.equal(masters, values.flatten().expand(2, -1))
    else:
        assert torch.equal(masters[0], now)
        assert not torch.equal(now, original.bfloat16().float())


@pytest.mark.parametrize("zero", [0, 1], ids="zero={}".format)
def test_values_before_rounding_are_let_go_of_once_an_optimizer_has_them(zero: int) -> None:
    def body(rank: int) -> list[list[str]]:
        module = nn.Sequential(linear(), linear())
        step = compiled_alone(module, PAIR, microbatches=1, zero=zero, precision=fxpipe.Precision())
        kept = []
        for params in (None, "module.0.weight", "module.1.weight"):
            optimizer = step.optimizer(torch.optim.SGD, params, lr=0.1) if params else None
            kept.append(sorted(step._state.originals))
            del optimizer
        return kept

    both = ["module.0.weight", "module.1.weight"]
    assert run_strict(body, 2) == [[both, both[1:], []]] * 2


# --- clearing to zero ---


def zero_each(step: fxpipe.ForwardBackward) -> None:
    for parameter in step.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARS: dict[str, Callable[[fxpipe.ForwardBackward, Any], object]] = {
    "optimizer": lambda step, optimizer: optimizer.zero_grad(set_to_none=False),
    "forward_backward": lambda step, optimizer: step.zero_grad(set_to_none=False),
    "module": lambda step, optimizer: step.module.zero_grad(set_to_none=False),
    "each": lambda step, optimizer: zero_each(step),
}


@pytest.mark.parametrize(
    ("by", "per_node", "zero", "earlier"),  # shards of one or of two by the last two
    every(5, list(product(CLEARS, [None, 1], [0, 1, 2], [(True, True), (False,), (True, False)]))),
    ids=str,
)
def test_whoever_clears_gradients_to_zero_clears_them(
    zero: int, per_node: int | None, by: str, earlier: tuple[bool, ...]
) -> None:
    """``earlier``: whether the calls before it are synchronised."""
    topology = Topology([("pipe", 1), ("data", 2)], per_node)

    def body(rank: int) -> Parts:
        step = compiled_alone(nn.Sequential(linear(), linear()), topology, microbatches=1, zero=zero)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.0)
        for sync in earlier:
            step.set_requires_gradient_sync(sync)
            step(torch.full((2, 4), 1.0 + rank))
        CLEARS[by](step, optimizer)
        step.set_requires_gradient_sync(True)
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    model(torch.ones(2, 4)).square().mean().backward()
    assert_parts(run_strict(body, 2), gradients(model, "module."))


@every_zero
@pytest.mark.parametrize("earlier", [(True,), (False,), (True, False)], ids=str)
def test_a_gradient_cleared_to_zero_alone_leaves_the_others(zero: int, earlier: tuple[bool, ...]) -> None:
    def clear(module: nn.Module) -> None:
        first = module.get_submodule("0").weight.grad
        assert first is not None
        first.zero_()

    def body(rank: int) -> Parts:
        module = nn.Sequential(linear(), linear())
        step = compiled_alone(module, PAIR, microbatches=1, zero=zero)
        for sync in earlier:
            step.set_requires_gradient_sync(sync)
            step(torch.ones(2, 4))
        clear(module)
        step.set_requires_gradient_sync(True)
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    for _ in earlier:
        model(torch.ones(2, 4)).square().mean().backward()
    clear(model)
    model(torch.ones(2, 4)).square().mean().backward()
    assert_parts(run_strict(body, 2), gradients(model, "module."))


@every_zero
@pytest.mark.parametrize("total", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, 1.0)], ids=str)
def test_one_optimizers_zero_grad_leaves_what_another_ones_parameters_have(
    zero: int, total: bool, weights: tuple[float, float]
) -> None:
    """Gradients of an unsynchronised call in which one replica has no weight, perhaps."""
    x = torch.randn(2, 4)

    def body(rank: int) -> Parts:
        module = nn.Sequential(linear(), linear())
        options = {"loss_weight": lambda x: float(bool(x[0, 0])), "total": total, "zero": zero}
        step = compiled_alone(module, PAIR, microbatches=1, **options)
        first, _second = (step.optimizer(torch.optim.SGD, [f"module.{place}.weight"], lr=0.1) for place in (0, 1))
        step.set_requires_gradient_sync(False)
        step(x if weights[rank] else torch.zeros(2, 4))
        step.set_requires_gradient_sync(True)
        first.zero_grad()
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    model(x).square().mean().backward()  # the mean of as many of them as have any weight
    model[0].weight.grad = None
    model(torch.ones(2, 4)).square().mean().backward()
    assert_parts(run_strict(body, 2), gradients(model, "module."))


@every_zero
def test_an_optimizers_step_behind_an_unsummed_call_is_told_or_refused(
    zero: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole parameters drift apart, as in DDP; of parts each rank would step its own by its own gradients."""

    def body(rank: int) -> str:
        step = compiled_alone(linear(), PAIR, microbatches=1, zero=zero)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
        step.set_requires_gradient_sync(False)
        step(torch.full((2, 4), rank + 1.0))
        try:
            optimizer.step()
        except fxpipe.RunError as error:
            return str(error)
        optimizer.zero_grad()
        optimizer.step()  # nothing is left that was not summed
        return ""

    told = run_strict(body, 2)
    fact = "optimizer.step() comes behind a call that has not summed its gradients over the replicas"
    assert [fact in each for each in told] == [zero > 0] * 2
    assert (fact in capsys.readouterr().err) == (zero == 0)


# --- replicas that differ ---


class Parallel(nn.Module):
    """Three stages side by side, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sides = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (stage_boundary(side(x * (place + 1))) for place, side in enumerate(self.sides))
        return self.last((a * b + c).tanh()).square().mean()


def of_replica(replica: int, count: int) -> list[Tensor]:
    """Its micro-batches, one row each."""
    return list(torch.randn(count, 4, generator=torch.Generator().manual_seed(replica)).split(1))


BESIDE = {"sides.0": 0, "sides.1": 0, "sides.2": 0, "last": 1}


def stepped_unevenly(counts: Sequence[int], rank: int, zero: int) -> Parts:
    topology = SQUARE
    step = fxpipe.compile(
        Parallel(),
        topology,
        microbatches=2,
        schedule="interleaved_1f1b",
        bucket_cap_mb=1e-6,
        placement=BESIDE,
        zero=zero,
    )
    replica = replica_of(topology)
    step.step_microbatches([((x,), {}) for x in of_replica(replica, counts[replica])])
    return parts(step)


UNEVEN = [(2, 2), (1, 2), (3, 1), (1, 4)]


@pytest.mark.parametrize(("zero", "counts"), in_turn([0, 1], UNEVEN), ids=str)
def test_replicas_may_have_different_numbers_of_micro_batches(zero: int, counts: tuple[int, int]) -> None:
    """Stages that run side by side on a rank end in another order then: replicas must start their sums in one."""
    model = Parallel()
    for replica, count in enumerate(counts):
        for x in of_replica(replica, count):
            (model(x) / sum(counts)).backward()
    assert_parts(run_strict(lambda rank: stepped_unevenly(counts, rank, zero), 4), gradients(model))


def test_replicas_must_have_as_many_micro_batches_where_each_is_summed() -> None:
    for text in refusals(lambda rank: stepped_unevenly((1, 2), rank, 2), 4):
        assert text.startswith(
            "RunError: zero=2 sums gradients in the order of the table, but the replicas run tables of their own"
        )


class Kinds(nn.Module):
    """A loss of any kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, total: bool = False, metric: str = "") -> Any:
        y = self.b(stage_boundary(self.a(x))).square()
        loss = fxpipe.Sum(y.sum(), y.numel()) if total else y.mean()
        return {"loss": loss, metric: y.detach().max()} if metric else loss


@pytest.mark.parametrize("first", [False, True], ids=["mean first", "sum first"])
def test_a_mean_for_one_kind_of_batch_and_a_sum_for_another_is_refused_on_all_ranks(first: bool) -> None:
    x = torch.ones(4, 4)

    def body(rank: int) -> None:
        step = fxpipe.compile(Kinds(), SQUARE, microbatches=2)
        step(x, total=first)
        step(x, total=first)
        step(x, total=not first)

    for text in refusals(body, 4):
        assert text.startswith("RunError: ")
        assert "the loss is a fxpipe.Sum in one step and a mean in another" in text


def test_a_sum_on_one_replica_and_a_mean_on_another_is_refused_on_all_ranks() -> None:
    def body(rank: int) -> None:
        fxpipe.compile(Kinds(), SQUARE, microbatches=2)(torch.ones(4, 4), total=replica_of(SQUARE) == 0)

    for text in refusals(body, 4):
        assert text.startswith("RunError: ")
        assert "fxpipe.Sum" in text


@pytest.mark.parametrize("metrics", [("accuracy", ""), ("accuracy", "largest")], ids=str)
def test_losses_that_come_with_different_metrics_are_refused_on_all_ranks(metrics: tuple[str, str]) -> None:
    def body(rank: int) -> None:
        fxpipe.compile(Kinds(), SQUARE, microbatches=2)(torch.ones(4, 4), metric=metrics[replica_of(SQUARE)])

    for text in refusals(body, 4):
        assert text.startswith("RunError: ")
        assert all(repr(metric) in text for metric in metrics if metric)
        assert "different metrics" in text


# --- types ---


class Complex(nn.Module):
    """The absolute value of a complex number times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.number * x).abs()


@every_zero
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
def test_a_complex_gradient_keeps_its_imaginary_part(zero: int, reduce: torch.dtype) -> None:
    def body(rank: int) -> Parts:
        precision = fxpipe.Precision(reduce=reduce)
        step = compiled_alone(Complex(), PAIR, microbatches=1, zero=zero, precision=precision)
        step(torch.full((2, 2), 1.0 + rank))
        return parts(step)

    # the mean over elements of |n x|² has the gradient 2 n x² / 2 in n, here for x = 1 and x = 2
    number = Complex().number.detach()
    assert_parts(run_strict(body, 2), {"module.number": number * (1 + 4) / 2})


class MixedTie(nn.Module):
    """A float32 weight tied over two stages, and float64 parameters in one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Parameter(torch.randn(64, dtype=torch.float64))
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.a((x.double() * self.wide).float())
        return self.b(stage_boundary(h)).square().mean()


def test_tied_gradients_are_clipped_to_the_same_bits_beside_other_types() -> None:
    def body(rank: int) -> list[Tensor]:
        step = fxpipe.compile(MixedTie(), Topology([("pipe", 2)]), microbatches=2)
        found = []
        for seed in range(20):
            step.zero_grad()
            step(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)))
            before = step.module.get_parameter("a.weight").grad.norm()
            assert step.clip_grad_norm_(0.01) > 0.01
            found.append(step.module.get_parameter("a.weight").grad.clone())
            assert found[-1].norm() < before
        return found

    first, second = run_strict(body, 2)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * 20


def test_sums_do_not_travel_in_float16() -> None:
    def body(rank: int) -> None:
        precision = fxpipe.Precision(reduce=torch.float16)
        fxpipe.compile(Kinds(), SQUARE, microbatches=2, precision=precision)(torch.ones(4, 4), total=True)

    for text in refusals(body, 4):
        assert text.startswith("RunError: ")
        assert "for which float16 has no room; write Precision(reduce=torch.bfloat16) or float32" in text


# --- tied parameters ---


SIDE = 520  # a weight of 1.03 MiB, more than the first bucket holds


class TiedAndMore(nn.Module):
    """Two stages that share two weights; ``where``: which of them has a large one of its own, too."""

    def __init__(self, where: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.a, self.b, self.a2, self.b2 = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(5))
        self.small = nn.Linear(SIDE, 3)
        self.a2.weight, self.b2.weight = self.a.weight, self.b.weight
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x).tanh() if self.where == 0 else x
        x = stage_boundary(self.b(self.a(x).tanh()).tanh())
        x = self.own(x).tanh() if self.where == 1 else x
        return self.small(self.b2(self.a2(x).tanh())).square().sum(1).mean()


class TiedAround(nn.Module):
    """Three stages: each two of them share two weights, and so do all three."""

    def __init__(self, where: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ab, self.bc, self.ca, self.abc = (
            nn.ParameterList(torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(2)) for _ in range(4)
        )
        self.own = nn.Parameter(torch.randn(SIDE, SIDE) / SIDE**0.5)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        for place, held in enumerate(((self.ab, self.ca), (self.bc, self.ab), (self.ca, self.bc))):
            for weight in (*held[0], *held[1], *self.abc, *([self.own] if place == self.where else [])):
                x = (x @ weight).tanh()
            x = stage_boundary(x) if place < 2 else x
        return x.square().sum(1).mean()


@pytest.mark.parametrize(
    ("zero", "where", "owners"), pairwise([0, 1, 2], [0, 1], [(TiedAndMore, 2), (TiedAround, 3)]), ids=str
)
def test_owners_of_large_tied_weights_may_have_others_of_their_own(
    zero: int, where: int, owners: tuple[Callable[[int], nn.Module], int]
) -> None:
    model, pipe = owners
    x = torch.randn(4, SIDE)
    topology = Topology([("pipe", pipe), ("data", 2)])

    def body(rank: int) -> tuple[Parts, bool]:
        step = fxpipe.compile(model(where), topology, microbatches=2, zero=zero)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
        step(x.chunk(2)[replica_of(topology)])
        found = parts(step)
        optimizer.step()
        return found, all(bool(parameter.isfinite().all()) for parameter in step.parameters())

    plain = model(where)
    plain(x).backward()
    ranks = run_strict(body, topology.world_size)
    assert_parts([found for found, _ in ranks], gradients(plain))
    assert all(finite for _, finite in ranks)


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@every_zero
def test_callables_on_different_ranks_may_share_a_parameter(zero: int) -> None:
    def body(rank: int) -> Parts:
        scale = nn.Parameter(torch.full((4,), 3.0))
        stages: dict[str, Any] = {"one": Scaled(scale), "two": Scaled(scale), "loss": lambda y: y.mean()}
        graph = fxpipe.StageGraph.from_callables(stages, [("one", "two"), ("two", "loss")], {"one": ["x"]})
        placement = {"one": 0, "two": 1, "loss": 1}
        step = fxpipe.compile(graph, SQUARE, placement=placement, microbatches=1, zero=zero)
        step(torch.full((2, 4), 1.0 + replica_of(SQUARE)))
        return parts(step)

    # the mean over rows and columns of s² x, x = 1 for one replica and 2 for the other, has the gradient 2 s x / 4
    assert_parts(run_strict(body, 4), {"one.scale": torch.full((4,), 2 * 3.0 * 1.5 / 4)})


class TiedOverTwo(nn.Module):
    """Three stages, the first two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(5, 5, bias=False) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(stage_boundary(self.b(stage_boundary(self.a(x))))).square().mean()


UNEVEN_NODES = Topology([("pipe", 3), ("data", 2)], ranks_per_node=3)  # the second data group lies in two of them


def over_nodes(topology: Topology, x: Tensor, **way: Any) -> Parts:
    step = fxpipe.compile(TiedOverTwo(), topology, microbatches=2, **way)
    step(x.chunk(topology.size("data"))[replica_of(topology)])
    return parts(step)


@sharded
def test_owners_in_nodes_that_cut_them_differently_are_refused_on_all_ranks(zero: int) -> None:
    said = refusals(lambda rank: over_nodes(UNEVEN_NODES, torch.ones(4, 5), zero=zero), 6)
    for text in said:
        assert text.startswith("TopologyError: ")
        assert "a.weight is tied over the pipe ranks [0, 1], whose data groups have [2, 1] ranks to a node" in text
        assert 'zero_scope="data"' in text


@pytest.mark.parametrize(
    ("way", "replicas"),
    in_turn([{}, {"zero": 1, "zero_scope": "data"}, {"zero": 2, "zero_scope": "data"}], [4, 2]),
    ids=str,
)
def test_nodes_that_cut_data_groups_differently_do_not_matter_otherwise(way: dict[str, Any], replicas: int) -> None:
    """Of three data groups the second lies in two nodes, one or two ranks in each."""
    topology = Topology([("pipe", 3), ("data", replicas)], ranks_per_node=3 * replicas // 2)
    x = torch.randn(8, 5)
    model = TiedOverTwo()
    model(x).backward()
    ranks = run_strict(lambda rank: over_nodes(topology, x, **way), topology.world_size)
    assert_parts(ranks, gradients(model))


# --- what is under way, and what is held ---


WIDE = 512  # a weight of 1 MiB


def steps_twice(rounds: int) -> tuple[Tensor, list[bool]]:
    """A parameter after rounds of one call and two steps; and whether it was plain PyTorch's after each of them."""
    fxpipe.init()
    step = compiled_alone(linear(WIDE), PAIR, microbatches=1, zero=1, bucket_cap_mb=100.0)
    optimizer = step.optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
    model = linear(WIDE)
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    right = []
    for number in range(rounds):
        x = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        plain.zero_grad()
        step(x)  # the same for both replicas
        model(x).square().mean().backward()
        for _ in range(2):
            optimizer.step()
            plain.step()
        here = step.module.get_parameter("module.weight")
        right.append(torch.allclose(here, model.weight, rtol=1e-4, atol=1e-6))
    return here.detach().clone(), right


def test_two_steps_behind_one_call_do_not_race(pool: Pool) -> None:
    (first, right), (second, also) = pool.run(steps_twice, 10, ranks=2)
    assert right == also == [True] * 10
    assert torch.equal(first, second)


def live(numel: int) -> int:
    """How many floating-point buffers of at least that many elements Python has made since ``gc.freeze()``."""
    tensors = [one for one in gc.get_objects() if type(one) is Tensor and one.is_floating_point()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size >= numel * 4 for size in storages.values())


def most_live(zero: int, microbatches: int) -> int:
    """The most buffers of the gradient's size that both ranks have, as gradients come, beside those of parameters."""
    counts: list[int] = []

    def body(rank: int) -> None:
        module = linear(256)
        step = compiled_alone(module, PAIR, microbatches=microbatches, zero=zero)
        counts.append(-live(256 * 256))
        module.weight.register_post_accumulate_grad_hook(lambda _: counts.append(live(256 * 256)))
        step(torch.ones(8, 256))

    gc.collect()
    gc.freeze()
    try:
        run_strict(body, 2)
    finally:
        gc.unfreeze()
    return max(counts)


def test_the_buffers_of_zero_2_do_not_grow_with_the_number_of_micro_batches() -> None:
    few, more, many = (most_live(2, microbatches) for microbatches in (2, 4, 8))
    assert 0 < few <= more == many <= 2 * 5


def what_is_left() -> tuple[bool, list[bool]]:
    """Whether a transport lives on, and its threads, once nobody has what was compiled and the world has ended."""
    step = compiled_alone(linear(), PAIR, microbatches=2)
    step(torch.ones(4, 4))
    transport = weakref.ref(step._transport._inner)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("collectives ")]
    assert threads
    del step
    torch.distributed.destroy_process_group()
    gc.collect()
    for thread in threads:
        thread.join(60)
    return transport() is not None, [thread.is_alive() for thread in threads]


def test_threads_of_what_nobody_has_any_more_end(pool: Pool) -> None:
    for lives, threads in pool.run(what_is_left, ranks=2):
        assert not lives
        assert not any(threads)


# --- weights written by hand, which masters undid in the next step without a word ---

BY_HAND: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    "no_grad": lambda model, values: [p.detach().copy_(values[name]) for name, p in model.named_parameters()],
    "data": lambda model, values: [p.data.copy_(values[name]) for name, p in model.named_parameters()],
    "load_state_dict": lambda model, values: model.load_state_dict(values),
}


def stepped_model(**options: Any) -> tuple[nn.Module, fxpipe.ForwardBackward, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    precision = None if options else fxpipe.Precision()
    topology = fxpipe.Topology([("pipe", 1)])
    forward_backward = fxpipe.compile(
        model, topology, loss_fn=lambda output, target: output.mean(), precision=precision
    )
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=2**-10, **options)
    forward_backward(torch.ones(4, 4), target=None)
    optimizer.step()
    optimizer.zero_grad()
    return model, forward_backward, optimizer


@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=["precision", "offload"])
@pytest.mark.parametrize("way", BY_HAND)
def test_masters_follow_weights_written_by_hand(way: str, options: dict[str, Any]) -> None:
    model, forward_backward, optimizer = stepped_model(**options)
    wanted = {name: torch.full_like(parameter, 0.5) for name, parameter in model.named_parameters()}
    BY_HAND[way](model, wanted)
    forward_backward(torch.ones(4, 4), target=None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        wanted[name] = (wanted[name].float() - 2**-10 * parameter.grad.float()).to(parameter.dtype)
    optimizer.step()
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=["precision", "offload"])
def test_other_memory_for_a_parameter_that_has_a_master_is_refused(options: dict[str, Any]) -> None:
    model, forward_backward, optimizer = stepped_model(**options)
    model[1].bias.data = torch.ones_like(model[1].bias)
    forward_backward(torch.ones(4, 4), target=None)
    with pytest.raises(fxpipe.RunError, match=r"1\.bias was given other memory, as by parameter\.data = "):
        optimizer.step()


# --- memory that repeats ---


class Expanded(nn.Module):
    """Has a buffer of one number, seen eight times; other ones on each rank."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.full((1, 1), number).expand(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(stage_boundary(self.one(x) * self.scale[0])).square().mean()


def test_an_expanded_buffer_is_that_of_the_first_replica() -> None:
    def body(rank: int) -> list[Tensor]:
        model = Expanded(2.0 + rank)
        step = fxpipe.compile(model, SQUARE, microbatches=2)
        step(torch.ones(4, 8))
        return [step.state_dict(full=True)["scale"], *([model.scale] if rank in (0, 1) else [])]

    for told in run_strict(body, 4):
        assert all(torch.equal(scale, torch.full((2, 8), 2.0)) for scale in told)
