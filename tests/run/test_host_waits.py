"""Host waits: where a step waits for the device, exactly, on simulated GPUs. examples/host_waits.md says why."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests import simulated_gpu
from tests.gpus import Gpus
from tests.thinned import every, in_turn

PLACES = {
    "run/step/finite.py": "loss",
    "run/step/batch_check.py": "digest",
    "sharding/distributed_optimizer.py": "optimizer",
    "run/step/microbatch_functions.py": "weight",
    "run/exchange.py": "message",
    "graph/question.py": "question",
    "batch/rows.py": "counts",
    "checkpoint/files/writer.py": "writer",
}
"""Where the host waits on purpose; of several, the first counts."""
LOSS = "loss: synchronize an event"

WIDTH, ROWS, MATMUL = 8, 4, 1.0
"""A product of matrices takes so many seconds of virtual time."""


class Two(nn.Module):
    """Two stages. ``tied``: by one weight. ``idle``: a parameter that nothing uses. ``sums``: the loss is a Sum."""

    def __init__(self, tied: bool = False, idle: bool = False, sums: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.two.weight = self.one.weight
        if idle:
            self.idle = nn.Linear(WIDTH, WIDTH)
        self.sums = sums

    def forward(self, x: Tensor) -> Any:
        h = fxpipe.stage_boundary(self.one(x).relu(), name="two")
        squares = self.two(h).square()
        return fxpipe.Sum(squares.sum(), squares.shape[0]) if self.sums else squares.mean()


def names(found: Sequence[simulated_gpu.Report]) -> list[str]:
    """Each wait as "place: what", a place that is not known as a whole."""
    waits = [report for report in found if report.kind == "sync"]
    known = [next((name for file, name in PLACES.items() if file in one.where), one.where) for one in waits]
    return [f"{place}: {wait.text}" for place, wait in zip(known, waits, strict=True)]


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """The waits of the block, once it is over. Races and faults of lifetime remain for ``gpus`` to see."""
    named: list[str] = []
    with simulated_gpu.watched() as found:
        yield named
    named += names(found)
    simulated_gpu.reports.extend(found)


class Trained:
    """A compiled model, its optimizer and ``step()``, with options of the model, of compile and of the optimizer."""

    def __init__(
        self,
        data: bool,
        model: Mapping[str, bool],
        options: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        clip: float | None = None,
        accumulates: bool = False,
    ) -> None:
        device = fxpipe.init()
        simulated_gpu.costs(**simulated_gpu.STRUCTURE)
        simulated_gpu.fix({"aten::mm": MATMUL, "aten::addmm": MATMUL})
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        pipe = 1 if data else 2
        topology = fxpipe.Topology([("pipe", pipe), ("data", max(ranks // pipe, 1))])
        options = {"microbatches": 2, **options}
        self.forward_backward = fxpipe.compile(Two(**model).to(device), topology, **options)
        self.optimizer = self.forward_backward.optimizer(torch.optim.AdamW, lr=1e-3, **optimizer)
        self._clip, self._accumulates = clip, accumulates
        torch.manual_seed(topology.data_rank if ranks > 1 else 0)
        self.batch = torch.randn(ROWS, WIDTH).to(device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        if self._accumulates:
            self.forward_backward.set_requires_gradient_sync(False)
            self.forward_backward(self.batch)
            self.forward_backward.set_requires_gradient_sync(True)
        self.forward_backward(self.batch)
        if self._clip is not None:
            self.forward_backward.clip_grad_norm_(0.1, self._clip)
        self.optimizer.step()

    def steady(self) -> None:
        """Goes on to the fifth step, by which the checks of the first batches are over."""
        for _ in range(4):
            self.step()


class Steady(NamedTuple):
    """The waits of a step; when the device will have done the step before, and when the host had put this one on it."""

    waits: list[str]
    before: float
    host: float


def steady(data: bool, *options: Any) -> Steady:
    trained = Trained(data, *options)
    trained.steady()
    before = simulated_gpu.now()
    with waits() as found:
        trained.step()
    host = simulated_gpu.host_now()
    trained.forward_backward.close()
    return Steady(found, before, host)


BF16, FP16 = fxpipe.Precision(), fxpipe.Precision(torch.float16)
ROWS_OF_TABLE: dict[str, tuple[Any, ...]] = {
    # data axis?, the model, compile, the optimizer, clip_grad_norm_'s order, whether two calls make a step
    "pipe": (False, {}, {}, {}),
    "pipe, recomputed": (False, {}, {"recompute": True}, {}),
    "pipe, tied": (False, {"tied": True}, {}, {}),
    "pipe, idle": (False, {"idle": True}, {}, {}),
    "pipe, bf16": (False, {}, {"precision": BF16}, {}),
    "data": (True, {}, {}, {}),
    "data, tied": (True, {"tied": True}, {}, {}),
    "data, idle": (True, {"idle": True}, {}, {}),
    **{f"zero {zero}": (True, {}, {"zero": zero}, {}) for zero in (1, 2, 3)},
    **{f"zero {zero}, idle": (True, {"idle": True}, {"zero": zero}, {}) for zero in (1, 3)},
    **{f"zero {zero}, bf16": (True, {}, {"zero": zero, "precision": BF16}, {}) for zero in (0, 1, 3)},
    **{f"clipped by order {order}": (False, {}, {}, {}, order) for order in (1.0, 2.0, 3.0, math.inf)},
    **{f"zero 1, clipped by order {order}": (True, {}, {"zero": 1}, {}, order) for order in (2.0, math.inf)},
}


@pytest.mark.parametrize("row", ROWS_OF_TABLE)
def test_a_steady_step_waits_for_the_loss_of_the_step_before_and_for_nothing_else(gpus: Gpus, row: str) -> None:
    ranks = gpus.run(steady, *ROWS_OF_TABLE[row])
    assert [one.waits for one in ranks] == [[LOSS]] * 2
    # a host is through with a step while the device still has all of it to do
    assert max(one.host for one in ranks) <= max(one.before for one in ranks)


@pytest.mark.parametrize("row", ["pipe", "pipe, tied", "pipe, bf16"])
def test_one_process_waits_as_little(gpus: Gpus, row: str) -> None:
    ((found, before, host),) = gpus.run(steady, *ROWS_OF_TABLE[row], ranks=1)
    assert found == [LOSS]
    assert host <= before


@pytest.mark.parametrize("zero", every(2, [0, 1, 3]))
def test_tied_parameters_of_several_replicas_make_no_step_wait(gpus: Gpus, zero: int) -> None:
    options = {"zero": fxpipe.Zero(zero, scope="data")}
    assert [one.waits for one in gpus.run(steady, False, {"tied": True}, options, {}, 1.0, ranks=4)] == [[LOSS]] * 4


OPTIMIZER = "optimizer: synchronize a stream"
WAITING: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "offload": ((False, {}, {}, {"offload": True}), [LOSS, OPTIMIZER]),
    "zero 1, offload, bf16": ((True, {}, {"zero": 1, "precision": BF16}, {"offload": True}), [LOSS, OPTIMIZER]),
    "fp16": ((False, {}, {"precision": FP16}, {}), [LOSS, "optimizer: item"]),
    "zero 2, fp16": ((True, {}, {"zero": 2, "precision": FP16}, {}), [LOSS, "optimizer: item"]),
    "error_if_nonfinite": ((False, {}, {"checks": fxpipe.Checks(batches=False, nonfinite="raise")}, {}), [LOSS]),
    "two calls": ((True, {}, {}, {}, None, True), [LOSS, LOSS]),
    "two calls, of sums": ((True, {"sums": True}, {"zero": 1}, {}, None, True), [LOSS, LOSS]),
}


@pytest.mark.parametrize("row", WAITING)
def test_what_else_a_step_waits_for(gpus: Gpus, row: str) -> None:
    options, expected = WAITING[row]
    assert [one.waits for one in gpus.run(steady, *options)] == [expected] * 2


def rows_above_0(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).sum()


class Asking(Two):
    """Looks at a value of its input."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(2 * x if x.isfinite().all() else x)


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x.detach().abs().max() > 0) + 2]


class Varying(Two):
    """What crosses the boundary has a length that its values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = Chosen()

    def forward(self, x: Tensor) -> Any:
        return self.two(fxpipe.stage_boundary(self.chosen(self.one(x)), name="two")).square().mean()


class Packing(Two):
    """Beside each row a packed input has as many as ``counts`` says."""

    def forward(self, x: Tensor, packed: Tensor, counts: Tensor) -> Any:
        return super().forward(x + packed.sum())


IN_FRONT = ("message: copy to the device", "message: copy to the host")
"""What says a shape that varies goes in front of the value, and of its gradient."""


def data_dependent(kind: str) -> list[str]:
    device = fxpipe.init()
    x = torch.ones(ROWS, WIDTH, device=device)
    models: dict[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]] = {
        "weight": (Two(), (x,), {"loss_weight": rows_above_0}),
        "cost": (Two(), (x,), {"microbatch_cost": len}),
        "question": (Asking(), (x,), {"example_args": (x,)}),
        "counts": (
            Packing(),
            (x, torch.ones(2 * ROWS, WIDTH, device=device), torch.full((ROWS,), 2, device=device)),
            {"batch_dim": {"packed": fxpipe.Packed("counts"), "x": 0, "counts": 0}},
        ),
        "varying": (Varying(), (x,), {"example_args": (x,), "boundaries": {"chosen": "whole"}}),
    }
    model, batch, options = models[kind]
    topology = fxpipe.Topology([("pipe", 2)])
    options = {"checks": fxpipe.Checks(batches=False), **options}
    forward_backward = fxpipe.compile(model.to(device), topology, microbatches=2, **options)
    for _ in range(3):
        forward_backward(*batch)
    with waits() as found:
        forward_backward(*batch)
    return sorted(wait for wait in found if "test_host_waits" not in wait.partition(" < ")[0])


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [  # of two micro-batches, on the rank of the first stage and of the second
        ("weight", [], ["weight: item"] * 2),
        ("cost", [], []),
        ("question", ["question: item"] * 2, ["question: item"] * 2),
        ("counts", ["counts: copy to the host"], ["counts: copy to the host"]),
        ("varying", [*IN_FRONT * 2], [*IN_FRONT * 2]),
    ],
)
def test_what_the_host_has_to_know_of_values_it_waits_for(
    gpus: Gpus, kind: str, first: list[str], second: list[str]
) -> None:
    assert gpus.run(data_dependent, kind) == [sorted([LOSS, *first]), sorted([LOSS, *second])]


def checked() -> list[list[str]]:
    """Of five steps, each."""
    trained, found = Trained(True, {}, {}, {}), list[list[str]]()
    for _ in range(5):
        with waits() as step:
            trained.step()
        found.append([wait for wait in step if wait.startswith(("digest", "loss"))])
    return found


def test_the_first_batches_digests_are_waited_for_a_step_later(gpus: Gpus) -> None:
    digest = "digest: synchronize an event"
    later = [[digest, LOSS]] * 3
    assert gpus.run(checked) == [[[], *later, [LOSS]]] * 2


def marked(zero: int) -> tuple[int, bool, bool]:
    """How many more events a step has once traffic was asked for, less the marks that it has; and whether the first
    answer has times, and the second."""
    trained = Trained(True, {}, {"zero": zero}, {})
    trained.steady()
    transport, counts = trained.forward_backward._transport, [simulated_gpu.counts()["event"]]
    trained.step()
    counts.append(simulated_gpu.counts()["event"])
    first = trained.forward_backward.traffic()
    counts.append(simulated_gpu.counts()["event"])
    trained.step()
    counts.append(simulated_gpu.counts()["event"])
    marks = sum(len(each) for _, each in transport.waits or ())
    second = trained.forward_backward.traffic()
    more = (counts[3] - counts[2]) - (counts[1] - counts[0])
    assert marks
    return more - marks, math.isnan(first.exposed), math.isnan(second.exposed)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_waits_are_marked_once_traffic_was_asked_for(gpus: Gpus, zero: int) -> None:
    assert gpus.run(marked, zero) == [(0, True, False)] * 2


def evaluated(data: bool, outputs: str) -> list[list[str]]:
    trained = Trained(data, {}, {}, {})
    trained.steady()

    def evaluate() -> list[str]:
        with waits() as found:
            trained.forward_backward.evaluate(trained.batch, outputs=outputs)
        return found

    for _ in range(4):  # the first batches of evaluation are checked, too
        evaluate()
    trained.step()
    return [evaluate(), evaluate()]


@pytest.mark.parametrize(("outputs", "data"), in_turn(["last", "all", "loss"], [False, True]))
def test_evaluate_waits_for_the_loss_of_a_step_before_it_and_else_for_nothing(
    gpus: Gpus, outputs: str, data: bool
) -> None:
    assert gpus.run(evaluated, data, outputs) == [[[LOSS], []]] * 2


def saved(folder: Path, data: bool, options: Mapping[str, Any]) -> tuple[list[str], list[str], bool]:
    """The waits of ``save`` and of the step behind it; those of the writer's thread; and whether the state of then is
    what is in the file, though the parameters have gone on."""
    trained = Trained(data, {}, options, {})
    trained.steady()
    step = trained.forward_backward
    then = {name: value.cpu() for name, value in step.state_dict().items()} if not options.get("zero") else {}
    with waits() as found:
        later = fxpipe.save(folder, step, trained.optimizer, step=5, block=False)
        trained.step()
        later.result()
    fxpipe.load(folder, step, trained.optimizer)
    same = all(torch.equal(step.state_dict()[name].cpu(), value) for name, value in then.items())
    step.close()
    writers = [wait for wait in found if wait.startswith("writer")]
    return [wait for wait in found if wait not in writers], writers, same


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (False, {}),
        (False, {"precision": BF16}),
        (True, {"zero": 1, "precision": BF16}),
        (True, {"zero": 3}),
    ],
    ids=["pipe", "pipe, bf16", "zero 1, bf16", "zero 3"],
)
def test_a_save_that_does_not_block_leaves_the_wait_to_its_thread(
    gpus: Gpus, tmp_path: Path, data: bool, options: Mapping[str, Any]
) -> None:
    for mine, writer, same in gpus.run(saved, tmp_path, data, options):
        assert mine == [LOSS]
        assert writer == ["writer: synchronize an event"]
        assert same
