"""Runs a model on one engine or another, and in plain PyTorch, and compares what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fxpipe
from tests.models import Callables, Case, Inputs
from tests.pool import Pool
from tests.strict_transport import current_seat, run_strict

Engine = Callable[..., list[Any]]
"""``engine(ranks, fn, *args)`` → what ``fn(*args)`` returned, by rank; one result where one process plays all."""

Engines = Callable[[str], Engine]
"""The name of an engine → the engine: the fixture ``engines``."""

STEPS = 3


def local(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [fn(*args)]


def strict(seed: int) -> Engine:
    return lambda ranks, fn, *args: run_strict(lambda rank: fn(*args), ranks, seed)


def distributed(pool: Pool) -> Engine:
    return lambda ranks, fn, *args: pool.run(fn, *args, ranks=ranks)


def engine_of(name: str, pool: Callable[[], Pool]) -> Engine:
    """The engine called ``name``; workers are started only for the one that needs them."""
    if name == "distributed":
        return distributed(pool())
    return local if name == "local" else strict(int(name.removeprefix("strict ")))


@dataclass
class Run:
    """What a training run left: a loss, metrics and gradients per step, and the state at the end."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: list[Mapping[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    """The parameters of this rank's stages."""


# --- fxpipe ---


def compiled(case: Case, **options: Any) -> fxpipe.ForwardBackward:
    """The case's model, compiled for its ranks."""
    model: Any = case.model()
    if isinstance(model, Callables):
        model = model.stage_graph()
    defaults: dict[str, Any] = {
        "microbatches": case.microbatches,
        "placement": case.placement,
        "loss_fn": case.loss_fn,
    }
    topology = options.pop("topology", None) or fxpipe.Topology([("pipe", case.ranks)])
    if case.inputs is not None and (case.loss_fn is not None or "batch" in case.batch()):
        defaults["example_kwargs"] = case.batch()
    if options.get("zero") != 3 and isinstance(topology, fxpipe.Topology) and replica_of(topology):
        nn.init.zeros_(next(model.parameters()))  # the first replica's values are the ones that count
    return fxpipe.compile(model, topology, **defaults | dict(case.options) | options)


Batches = Sequence[Inputs | tuple[Inputs, ...]]
"""Of each step the batch, or that of each replica."""


def trained(case: Case, batches: Batches, recorded: bool = False, **options: Any) -> Run:
    """A step per batch on the engine that this process or thread belongs to."""
    forward_backward = compiled(case, **options)
    forward_backward.record_timeline(recorded)
    assert len(forward_backward.stages) == case.stages, str(forward_backward.stages)
    return stepped(forward_backward, case, batches)


def stepped(forward_backward: fxpipe.ForwardBackward, case: Case, batches: Batches) -> Run:
    """A step per batch of what is compiled already. Gradients of which a rank has only a part are left out."""
    groups = (case.groups(forward_backward.named_parameters()),) if case.groups else ()
    optimizer = forward_backward.optimizer(case.optimizer, *groups, **case.optimizer_options)
    named = dict(forward_backward.named_parameters())
    run = Run(owned=set(named))
    for batch in batches:
        optimizer.zero_grad()
        mine = batch[replica_of(forward_backward.topology)] if isinstance(batch, tuple) else batch
        run.losses.append(forward_backward(**mine))
        run.metrics.append(dict(forward_backward.metrics))
        run.gradients.append(gradients_of((n, p) for n, p in named.items() if not is_sharded(p.grad)))
        optimizer.step()
    run.state = forward_backward.state_dict(full=True)
    return run


def gradients_of(named: Any) -> dict[str, Tensor | None]:
    """None also where a replica has only a part of a gradient: with ``zero=2``."""
    return {name: None if p.grad is None or p.grad.is_meta else p.grad.clone() for name, p in named}


def is_sharded(gradient: Tensor | None) -> bool:
    return gradient is not None and (gradient.is_meta or isinstance(gradient, DTensor))


def replica_of(topology: fxpipe.Topology) -> int:
    """The place of this process, or of this thread of a strict world, on the data axis; 0 where there is none."""
    if topology.size("data") == 1:
        return 0
    seat = current_seat()
    if seat is None:
        fxpipe.init()
    rank = torch.distributed.get_rank() if seat is None else seat.rank
    return topology.coordinate(rank).get("data", 0)


# --- plain PyTorch ---


def cut(batch: Inputs, microbatches: int) -> list[Inputs]:
    """Micro-batches, as ``torch.tensor_split`` cuts them."""
    leaves, spec = pytree.tree_flatten(batch)
    parts = [
        leaf.tensor_split(microbatches) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * microbatches
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[place] for part in parts], spec) for place in range(microbatches)]


def rows_of(batch: Inputs) -> int:
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())


def called(case: Case, model: nn.Module, batch: Inputs) -> Any:
    if case.loss_fn is None:
        return model(**batch)
    inputs = {name: value for name, value in batch.items() if name != "target"}
    return case.loss_fn(model(**inputs), batch["target"])


def accumulate(
    call: Callable[[int, Inputs], Any], microbatches: Sequence[Inputs], weights: Sequence[float] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference loop: ``(loss_i * (w_i / Σw)).backward()`` in order; the sum of the losses, and of metrics.

    Of losses that are a ``Sum`` it is Σ total / Σ count.
    """
    sums: list[fxpipe.Sum] = []
    weights = [float(rows_of(batch)) for batch in microbatches] if weights is None else weights
    total, metrics = None, {}
    for place, (batch, weight) in enumerate(zip(microbatches, weights, strict=True)):
        result = call(place, batch)
        loss = result["loss"] if isinstance(result, dict) else result
        share = weight / sum(weights)
        if isinstance(loss, fxpipe.Sum):
            sums.append(loss)
        elif weight:
            (loss * share).backward()
            part = loss.detach().to(torch.promote_types(loss.dtype, torch.float32)) * share
            total = part if total is None else total + part
        for name, value in result.items() if isinstance(result, dict) else ():
            if name != "loss" and value.dim() == 0:
                added = value.detach() * share if value.is_floating_point() else value
                metrics[name] = metrics[name] + added if name in metrics else added
    if sums:
        total = torch.stack([part.total for part in sums]).sum() / sum(part.count for part in sums)
        total.backward()
    assert total is not None
    return total.detach(), metrics


def reference(
    case: Case, batches: Batches, seed: Callable[[int, int, int], int] | None = None
) -> tuple[Run, nn.Module]:
    """The same in plain PyTorch. ``seed``: (stage, micro-batch, step) → a seed for models that draw."""
    model = case.model()
    groups = case.groups(model.named_parameters()) if case.groups else model.parameters()
    optimizer = case.optimizer(groups, **case.optimizer_options)
    run = Run()
    for step, batch in enumerate(batches):
        optimizer.zero_grad()

        def call(place: int, part: Inputs, step: int = step) -> Any:
            if seed is None:
                return called(case, model, part)
            values: Any = tuple(part.values())
            for stage, function in enumerate(model.parts()):
                torch.manual_seed(seed(stage, place, step))
                values = function(*values)
            return values

        replicas = batch if isinstance(batch, tuple) else (batch,)
        parts = [part for each in replicas for part in (case.cut or cut)(each, case.microbatches)]
        weight = case.options.get("loss_weight")
        loss, metrics = accumulate(call, parts, None if weight is None else [float(weight(**part)) for part in parts])
        run.losses.append(loss)
        run.metrics.append(metrics)
        run.gradients.append(gradients_of(model.named_parameters(remove_duplicate=False)))
        optimizer.step()
    run.state = model.state_dict()
    return run, model


# --- comparing ---


def assert_same(got: Tensor | None, wanted: Tensor | None, what: str, tolerance: float = 0.0) -> None:
    """Equal to the last bit, or to within ``tolerance`` of the largest number."""
    if got is None or wanted is None:
        assert got is wanted, f"{what}: got {got}, wanted {wanted}"
        return
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
    if torch.equal(got, wanted):
        return
    gap = (got.double() - wanted.double()).abs().max().item()
    scale = wanted.double().abs().max().item()
    assert gap <= tolerance * scale, f"{what} is off by {gap:.3g} where the largest number is {scale:.3g}"


Steps = list[tuple[Tensor, dict[str, Tensor | None]]]
"""The loss of each step, and this rank's gradients of it."""


def steps_of(forward_backward: fxpipe.ForwardBackward, batches: Sequence[Inputs]) -> Steps:
    """A step for each batch, each with its own gradients."""
    steps = []
    for batch in batches:
        forward_backward.zero_grad()
        loss = forward_backward(**batch)
        steps.append((loss, gradients_of(forward_backward.named_parameters())))
    return steps


def assert_gradients(
    got: Mapping[str, Tensor | None], model: nn.Module, tolerance: float = 0.0, what: str = ""
) -> None:
    """A rank's gradients are the plain model's."""
    wanted = gradients_of(model.named_parameters(remove_duplicate=False))
    for name, gradient in got.items():
        assert_same(gradient, wanted[name], f"{what}{name}", tolerance)


def assert_steps(
    runs: Sequence[Steps], model: nn.Module, batches: Sequence[Inputs], microbatches: int, tolerance: float = 0.0
) -> None:
    """On every rank each step has the loss and the gradients of the plain model."""
    for step, batch in enumerate(batches):
        model.zero_grad()
        loss, _ = accumulate(lambda _, part: model(**part), cut(batch, microbatches))
        for rank, run in enumerate(runs):
            place = f"rank {rank}, step {step}: "
            assert_same(run[step][0], loss, place + "loss", tolerance)
            assert_gradients(run[step][1], model, tolerance, place)


def assert_run(runs: Sequence[Run], wanted: Run, tolerance: float = 0.0) -> None:
    """What the ranks have is what plain PyTorch has, and each parameter is with somebody."""
    owned: set[str] = set()
    for rank, run in enumerate(runs):
        for step, loss in enumerate(wanted.losses):
            place = f"rank {rank}, step {step}: "
            assert not run.losses[step].requires_grad
            assert_same(run.losses[step], loss, place + "loss", tolerance)
            assert run.metrics[step].keys() == wanted.metrics[step].keys()
            for name, metric in wanted.metrics[step].items():
                assert_same(run.metrics[step][name], metric, place + name, max(tolerance, 1e-6))
            for name, gradient in run.gradients[step].items():
                assert_same(gradient, wanted.gradients[step][name], f"{place}gradient of {name}", tolerance)
        assert run.state.keys() == wanted.state.keys()
        for name, tensor in wanted.state.items():
            assert_same(run.state[name], tensor, f"rank {rank}: {name} after the last step", tolerance)
        owned |= run.owned
    memory = {wanted.state[name].data_ptr() for name in owned}
    lost = [name for name in wanted.gradients[0] if wanted.state[name].data_ptr() not in memory]
    assert not lost, f"no rank holds {lost}"


def assert_trains(case: Case, engine: Engine = local, batches: Batches = (), **options: Any) -> list[Run]:
    """On every rank a step of each batch is plain PyTorch's; the runs. ``options``: of ``fxpipe.compile``."""
    batches = batches or case.batches(STEPS)
    topology = options.get("topology") or fxpipe.Topology([("pipe", case.ranks)])
    runs = engine(topology.world_size, partial(trained, case, batches, **options))
    plain = replace(case, microbatches=options.get("microbatches", case.microbatches))
    tolerance = max(case.tolerance, 1e-6) if isinstance(batches[0], tuple) else case.tolerance
    assert_run(runs, reference(plain, batches)[0], tolerance)
    return runs
