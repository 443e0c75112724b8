"""Capture check: runs the stages of a capture against the model itself before a training run relies on the stages.

Takes: a ``StageGraph``, its ``Request``, and a ``Sample`` of micro-batches with numbers. Gives: the outcome in words
for ``.stages``, or a TraceError with the first value that differs.

1. The check is left out if it is not cheap, or if the model or the example has no numbers.
2. Two micro-batches are chosen that differ, as a value of the first that became a constant then shows.
3. The model runs on the first, then the stages from the same state with the same random numbers. Loss, gradients and
   buffers are compared; then the same on the second, each in the state that it has reached.
4. Values that are not close are suspects. Both run again: the stages count their operators, which gives the rounding
   error that so many operators may have. A suspect beyond it is the TraceError.
5. In training, the losses of both micro-batches together and apart show whether rows change each other's loss
   (``row_check``).
6. The model gets its state back.

It compares on two micro-batches only: code that branches on other numbers is not seen. It changes no capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.device import is_accelerator
from fxpipe.errors import TopologyError, TraceError
from fxpipe.graph.gathering import added
from fxpipe.graph.stage_graph import Edge, StageGraph, all_tensors
from fxpipe.packed import BatchDim, counted, rule_at
from fxpipe.snapshots.snapshot import State
from fxpipe.stage.loss import MicrobatchLoss, columns_of, read_loss
from fxpipe.stage.modes import within
from fxpipe.stage.stage_calls import Saved
from fxpipe.tensors.rounding import differences, gap, in_double, is_close, is_same, largest
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.fakes import FakeTensor
from fxpipe.torch_compat.modules import BATCH_STATISTICS
from fxpipe.torch_compat.tensors import gradients_through, tensors_in
from fxpipe.trace import Request
from fxpipe.trace.checks.row_check import Losses, check_rows
from fxpipe.trace.opaque.region_calls import watching
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.patching import LEAKED
from fxpipe.trace.replay import CONSTANT, Batch, Rounding, as_in_a_step, gpus_of, in_compute_dtype, own

MOST_PARAMETERS = 2**28
"""The most parameter elements of a model that is checked: the check needs three times the parameters' memory."""
MOST_WORK, MOST_ON_ACCELERATOR = 1e10, 1e12
"""The most parameter elements × positions of a micro-batch (tokens, steps, pixels). The check runs four steps of 6
floating-point operations for each such pair, so 1e10 pairs take some seconds at 50 GFLOP/s."""


NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Sample:
    """Micro-batches with real tensors: of the example, or of a batch after compile (``later``).

    ``batch_dim``: where inputs have their rows.
    """

    batches: Sequence[Batch]
    batch_dim: BatchDim
    later: bool = False

    def pairs(self, places: Sequence[int]) -> list[tuple[Batch, Batch]]:
        """Pairs of different micro-batches, the best pair first; empty if all rows are equal.

        The second of a pair is the last of ``places`` that differs from the first, or the first half of the first's
        rows twice. The first pair perturbs it, since zeros and constant masks hide errors; the other pair leaves it
        unchanged, for a model that allows only some numbers.
        """
        first = self.batches[places[0]]
        # 1. Another micro-batch shows values of the first micro-batch that the capture has made constants.
        others = [self.batches[index] for index in reversed(places[1:])]
        # 2. A single micro-batch: other rows with numbers that the model allows, such as token ids. A permutation would
        # not help, since a loss is a mean. Packed inputs are left out: their counts belong to the original rows.
        if not counted(self.batch_dim):
            twice = {name: partial(_first_half_twice, along=rule_at(self.batch_dim, name)) for name in first}
            others.append({name: pytree.tree_map_only(Tensor, twice[name], value) for name, value in first.items()})
        # 3. Changed numbers, since zeros and constant masks hide code that ignores them.
        second = next((other for other in others if not _equal(first, other)), first)
        perturbed = dict(pytree.tree_map_only(Tensor, _perturbed, dict(second)))
        return [(first, other) for other in (perturbed, second) if not _equal(first, other)]


def _perturbed(leaf: Tensor) -> Tensor:
    """Scales every third floating-point number towards zero, which stays in range; swaps 0 and 1 in a tensor of zeros
    and ones, such as a mask."""
    if not leaf.is_floating_point() or leaf.is_meta or leaf.layout is not torch.strided:
        return leaf
    old = leaf.detach()
    # A tensor of zeros and ones is a mask. A model may compare a mask with 0, and 0.75 would mean the same as 1.
    other = 1 - old if ((old == 0) | (old == 1)).all() else old * 0.75
    third = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape) % 3 == 1
    return torch.where(third, other, old).requires_grad_(leaf.requires_grad)


def _first_half_twice(leaf: Tensor, along: Any) -> Tensor:
    """The first half of a tensor's rows twice, with as many rows as before."""
    if along is None or not leaf.dim() or leaf.is_meta:
        return leaf
    rows = leaf.shape[along]
    return leaf.index_select(along, torch.arange(rows, device=leaf.device) % max(1, (rows + 1) // 2))


def _equal(batch: Batch, other: Batch) -> bool:
    """Whether all tensors of two micro-batches are equal."""
    leaves, others = pytree.tree_leaves(dict(batch)), pytree.tree_leaves(dict(other))
    pairs = zip(leaves, others, strict=False)  # lists have as many entries as there are rows
    return len(leaves) == len(others) and all(
        torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)
    )


def check(
    graph: StageGraph,
    request: Request,
    sample: Sample,
    places: Sequence[int],
    holds: Callable[[Batch], bool],
    loss_weight: Callable[..., Any] | None,
) -> str:
    """Runs stages and model on two micro-batches, and compares losses, gradients and buffers; in evaluation, results
    and buffers.

    Both runs begin from the same state, which is restored, and draw the same random numbers. Values are equal within
    ``CLOSE`` units in the last place of a tensor's largest number, or within the ``tolerance`` of ``Rounding``.

    Args:
        graph: the stages, on this process.
        request: the capture; its model runs for comparison.
        sample: the micro-batches.
        places: the indices of the micro-batches that this capture is for. The first of them is compared.
        holds: whether the stages are valid for a micro-batch, by the values that forward asks for.
        loss_weight: the user's weights of micro-batches, for the check of rows.

    Returns:
        The outcome in words, for ``.stages``.

    Raises:
        TraceError: the first value that differs.
        RunError: the loss is a sum over rows.
    """
    # 1. whether to check
    why = _unfit(request, sample.batches[places[0]])
    if why:
        return f"{NOT_CHECKED}: {why}"
    why = "the example has one row, or rows that are all equal, or other values that forward asks for"
    norms = any(isinstance(part, BATCH_STATISTICS) and part.training for part in request.module.modules())
    # 2. two micro-batches
    pairs = [pair for pair in sample.pairs(places) if all(map(holds, pair))]
    with in_compute_dtype(request):
        for batches in pairs:
            trial = _Trial(graph, request, batches)
            try:
                if why := trial.compare():  # 3. and 4.
                    continue
                # 5. rows
                if request.training and len(sample.batches) > 1 and not (sample.later or graph.gathers):
                    losses = Losses(trial.loss, batches, sample.batch_dim, trial.losses)
                    check_rows(losses, loss_weight, len(sample.batches), norms)
            finally:  # 6. restore
                trial.start.restore()
            seen = "; batch statistics are those of a micro-batch" * norms
            return f"checked against the model on 2 micro-batches{seen}"
    return f"{NOT_CHECKED}: {why}"


def _in_a_line(error: Exception) -> str:
    """An error's class, and the first line of its message."""
    texts = str(error).strip().splitlines()
    return f"{type(error).__name__}: {texts[0] if texts else ''}"


def _unfit(request: Request, batch: Batch) -> str:
    """The reason why a model cannot be checked, or not cheaply; empty if it can."""
    # Bounds are fixed so that all ranks check or no rank does: measured seconds would differ between ranks.
    inputs = tensors_in(dict(batch))
    tensors = all_tensors(request.module).values()
    if any(tensor.is_meta for tensor in [*tensors, *inputs]):
        return "the model or the example is on the meta device"
    if any(isinstance(part, nn.SyncBatchNorm) for part in request.module.modules()):
        return "SyncBatchNorm waits for other ranks in forward"
    parameters = sum(parameter.numel() for parameter in request.module.parameters())
    positions = max(map(_positions, inputs), default=0)
    most = MOST_ON_ACCELERATOR if any(is_accelerator(tensor.device) for tensor in tensors) else MOST_WORK
    if parameters > MOST_PARAMETERS or parameters * positions > most:
        return f"{parameters:,} numbers in parameters at {positions:,} positions of a micro-batch take too long"
    return ""


def _positions(tensor: Tensor) -> int:
    """The most positions at which a parameter is used. Integers are tokens; images have channels in dimension 1, other
    floating-point inputs have features last."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor.numel()
    features = tensor.shape[-1] if tensor.dim() < 4 else tensor.shape[1]
    return tensor.numel() // max(features, 1)


class _Called(nn.Module):
    """Calls a region, or an opaque method, as a module, as the stages do, so that its random numbers begin anew."""

    def forward(self, region: Region, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return inner(*args, **kwargs)


class Fact(NamedTuple):
    """The name of a compared value, such as "the gradient of" a parameter, and its micro-batch."""

    kind: str
    name: str
    microbatch: int

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.name, f"on micro-batch {self.microbatch}")))


GRADIENT, BUFFER, LOSS, COUNT = "the gradient of", "the buffer", "the loss", "the count of the loss"
Seen = dict[Fact, Tensor | None]


class _Trial:
    """The stages, the model, and the micro-batches on which both run.

    A micro-batch ends before the next begins, and a stage's gradient that equals the model's is freed as it arrives: a
    copy of the parameters and one gradient of each exist at a time.
    """

    def __init__(self, graph: StageGraph, request: Request, batches: Sequence[Batch]) -> None:
        self.graph, self.request, self.batches = graph, request, batches
        self._draws = any(stage.draws_random for stage in graph)
        self.losses: dict[tuple[int, ...], MicrobatchLoss] = {}
        """(micro-batch,) → the model's loss."""
        self._devices = gpus_of(request.roots)
        # Every run begins from this state and draws the same random numbers, so any difference comes from the capture.
        self.start = State.from_modules(request.roots, self._devices, request.generators)
        self._second: dict[Any, State] = {}
        """``model`` or ``stages`` → the state in which it begins the second micro-batch."""
        self._wanted = Seen()
        """The model's values on this micro-batch."""
        self._trainable = {name: p for name, p in request.module.named_parameters() if p.requires_grad}
        self._seed = 1.0  # the gradient of the stages' loss
        self._suspects: list[tuple[Fact, float, float, str]] = []
        """Values that are not close: (name, largest difference, largest number of the model's value, both in words)."""

    @contextmanager
    def _from(self, state: State, rounding: Rounding | None = None) -> Iterator[None]:
        """A context in the modes of a step that begins in this state."""
        state.restore()
        with as_in_a_step(self.request, self._devices if self._draws else None), rounding or nullcontext():
            yield

    def run(self, call: Callable[[Batch, int], Seen], microbatch: int, rounding: Rounding | None = None) -> Seen:
        """Runs ``call`` on a micro-batch, the second in the state that the first left; returns values to compare."""
        with self._from(self._second[call] if microbatch else self.start, rounding):
            seen = call(own(self.request, self.batches[microbatch]), microbatch)
            for name, buffer in self.request.module.named_buffers():
                seen[Fact(BUFFER, name, microbatch)] = buffer.detach().clone()
            if call not in self._second:
                before = self.start.numbers
                self._second[call] = State.from_modules(
                    self.request.roots, self._devices, self.request.generators, before
                )
        return seen

    def compare(self) -> str:
        """Returns the reason why a micro-batch cannot be compared, or "". TraceError for the first value of the stages
        that differs from the model's by more than the rounding error of so many operators.

        A gradient's scale is at least an eighth of the model's largest gradient: a gradient of 0 is only rounding.
        """
        why = self._compare_on(0) or self._compare_on(1)
        if why or not self._suspects:
            return why
        # Both run again: the stages, to count their operators, and the model, for its largest gradient.
        rounding, most, self._wanted = Rounding(), 0.0, Seen()
        for microbatch in range(len(self.batches)):
            self.run(self.stages, microbatch, rounding)
            seen = self.run(self.model, microbatch).items()
            most = max([most, *(largest(value) for fact, value in seen if fact.kind == GRADIENT)])
            del seen
        for fact, apart, scale, difference in self._suspects:
            least = most / CONSTANT if fact.kind == GRADIENT else 0.0
            if apart > rounding.tolerance * max(scale, least):
                raise TraceError(f"{_WRONG}: {difference}; {_INSTEAD}")
        return ""

    def _compare_on(self, microbatch: int) -> str:
        """Runs both on a micro-batch, and adds what is not close to the suspects. Returns the reason if the model
        fails."""
        try:
            self._wanted = Seen()
            self._wanted = wanted = self.run(self.model, microbatch)
        except TopologyError:
            raise
        except Exception as error:
            return f"the model fails on a micro-batch of the example: {_in_a_line(error)}"
        if any(isinstance(value, FakeTensor) for value in wanted.values()):  # the model keeps a fake tensor
            raise TraceError(LEAKED)
        try:
            got = self.run(self.stages, microbatch)
        except torch.OutOfMemoryError as error:
            return _in_a_line(error)
        except Exception as error:
            raise TraceError(f"{_WRONG}: where the model runs, they fail: {_in_a_line(error)}; {_INSTEAD}") from error
        for fact, right in wanted.items():
            if not is_close(mine := got.get(fact), right):
                self._suspects.append((fact, gap(mine, right), largest(right), self._difference(fact, mine, right)))
        if self.request.training:
            value, count = (wanted.get(Fact(kind, "", microbatch)) for kind in (LOSS, COUNT))
            self.losses[microbatch,] = MicrobatchLoss(value, count, {})  # type: ignore[arg-type]
        if self.graph.counting is not None and self.graph.counting.function is None:
            self._wanted = wanted = got
            self._check_proportional(got, microbatch)
        return ""

    def model(self, batch: Batch, microbatch: int) -> Seen:
        """The values of the model on a micro-batch. Regions are called as modules, so that random numbers begin anew
        there."""
        watched = watching(self.request.module, self.request.whole, _Called())
        with watched, within(self.request.autocast):
            result = self.request.call(batch)

        def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
            if not (loss.requires_grad and parameters):
                return [None] * len(parameters)
            return torch.autograd.grad(loss, parameters, allow_unused=True)

        return self._seen(result, microbatch, gradients)

    def stages(self, batch: Batch, microbatch: int) -> Seen:
        """The values of the stages on a micro-batch: all forwards, then all backwards."""
        # Stages run as on their ranks, but in one process: an output goes to the stages that take it, and is released.
        arrived: dict[Edge, Any] = {}
        saved: list[Saved] = []
        result = None
        for stage in self.graph:
            values: Batch = {**batch, **{str(size): size.of(batch) for size in stage.sizes}}
            inputs = [values[entry] if isinstance(entry, str) else arrived[entry] for entry in stage.inputs]
            arrived = {edge: value for edge, value in arrived.items() if edge not in stage.inputs}
            with within(self.request.autocast):
                outputs, data = stage.forward(*inputs)
            saved.append(data)
            arrived |= dict(zip(stage.outputs, outputs, strict=False))  # the result belongs to no edge
            result = outputs[-1] if stage.returns_result else result
        equal = [self._wanted.get(Fact(GRADIENT, name, microbatch)) for name in self._trainable]
        return self._seen(result, microbatch, partial(self._backward, saved, equal))

    def _backward(
        self, saved: Sequence[Saved], equal: Sequence[Tensor | None], loss: Tensor, parameters: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The gradient of each of these parameters, summed over the stages, and divided by the loss's gradient; it is
        the tensor in ``equal`` if it has the same bits."""

        def taken(right: Tensor | None, gradient: Tensor) -> Tensor:
            own = gradient if self._seed == 1 else gradient / self._seed
            return right if right is not None and is_same(own, right) else own

        saved[self.graph.output_stage].take_root(loss, self._seed)
        with gradients_through([(p, partial(taken, right)) for p, right in zip(parameters, equal, strict=True)]):
            return self._summed(saved, parameters)

    def _summed(self, saved: Sequence[Saved], parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Each parameter's gradient, summed over the stages' backwards, which run in reverse order."""
        sums: list[Tensor | None] = [None] * len(parameters)
        returned: dict[Edge, Any] = {}
        for stage, data in reversed(list(zip(self.graph, saved, strict=True))):
            output_gradients = [returned.pop(edge, None) for edge in stage.outputs] + [True] * stage.returns_result
            arrivals, gradients = stage.backward.apart(data, output_gradients, parameters)
            for entry, gradient in zip(stage.inputs, arrivals, strict=True):
                if isinstance(entry, Edge):  # a value gathered as "batch" and as "global" arrives twice
                    returned[entry] = added(returned[entry], gradient) if entry in returned else gradient
            sums = list(map(added, sums, gradients))
        return sums

    def _check_proportional(self, got: Seen, microbatch: int) -> None:
        """TraceError if the stages' gradients in ``got`` are not proportional to the loss's gradient. If the count of a
        ``Sum`` is known late, a step divides the gradients by it after the backward."""
        self._seed = 2.0**-10  # a power of 2 rounds nothing
        scaled = self.run(self.stages, microbatch)
        self._seed = 1.0
        if suspects := [fact for fact, right in got.items() if not is_close(scaled[fact], right)]:
            raise TraceError(
                f"{suspects[0]} is not proportional to the gradient of the loss, as the backward of an "
                "autograd.Function may make it that adds one of its own. The inputs do not decide the count of this "
                "fxpipe.Sum, so that gradients are divided by it behind the backward: compute the count from the "
                "inputs (labels, masks), or return the mean"
            )

    def _seen(
        self, result: Any, microbatch: int, gradients: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor | None]]
    ) -> Seen:
        """The loss and its ``gradients``; in evaluation the tensors and numbers of the result."""
        if not self.request.training:
            leaves, _ = pytree.tree_flatten_with_path(result)
            numbers = [(path, leaf) for path, leaf in leaves if isinstance(leaf, (Tensor, int, float))]
            return {
                Fact("the output", pytree.keystr(path), microbatch): torch.as_tensor(leaf).detach()
                for path, leaf in numbers
            }
        part = read_loss(result)
        computed = gradients(part.value, list(self._trainable.values()))
        seen = Seen({Fact(LOSS, "", microbatch): part.value.detach()})
        if part.count is not None:
            seen[Fact(COUNT, "", microbatch)] = torch.as_tensor(part.count).detach().clone()
        for (name, form), value in columns_of(part.metrics).items():
            metric = repr(name) if form in ("mean", "integer") else f"{name!r} ({form})"
            seen[Fact("the loss's", metric, microbatch)] = torch.as_tensor(value).detach().clone()
        named = zip(self._trainable, computed, strict=True)
        return seen | {Fact(GRADIENT, name, microbatch): gradient for name, gradient in named}

    def loss(self, batch: Batch) -> MicrobatchLoss:
        """The model's loss of a batch, from the state and the random numbers with which each run begins."""
        with self._from(self.start), torch.no_grad(), within(self.request.autocast):
            return read_loss(self.request.call(own(self.request, batch)))

    def _difference(self, fact: Fact, got: Tensor | None, wanted: Tensor | None) -> str:
        """A suspect in words: the value in the stages and in the model, at the place where they differ most."""
        owners = [stage.name for stage in self.graph if fact.name in stage.tensors]
        if fact.kind not in (GRADIENT, BUFFER):
            owners = [self.graph[self.graph.output_stage].name]
        ours = f"in stage {', '.join(map(repr, owners))}" if owners else "in the stages"
        own, other = in_double(got, wanted), in_double(wanted, got)
        if own.shape != other.shape:
            return f"{fact} has shape {list(own.shape)} {ours} and {list(other.shape)} in the model"
        apart = differences(own, other)
        index = int(apart.argmax())
        where = f", at {list(map(int, torch.unravel_index(apart.argmax(), own.shape)))}" if own.dim() else ""
        mine, right = (value.flatten()[index].item() for value in (own, other))
        return f"{fact} is {mine:.6g} {ours} and {right:.6g} in the model{where}"


_WRONG = "the captured stages do not compute what the model does"
_INSTEAD = (
    "what forward depends on beside its inputs, parameters and buffers (a global, a closure, a class) is not in the "
    "capture: use another tracer=, or pass it as an input"
)
