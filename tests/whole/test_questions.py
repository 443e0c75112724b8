"""What forward asks about its inputs: each outcome takes a capture, whichever rank was given the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import FxpipeError, RunError, TraceError
from tests.harness import (
    accumulate,
    assert_gradients,
    assert_same,
    assert_steps,
    cut,
    gradients_of,
    replica_of,
    steps_of,
)
from tests.layered import WIDTH, Layers, compiled
from tests.models import Inputs
from tests.pool import Pool

CUTS = ["layers.1", "layers.3"]


class Masked(Layers):
    """As transformers' encoders skip a mask of ones, between submodules."""

    def run(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if mask.all() else layer(x * mask[:, None]) + 1
        return x

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return (self.run(x, mask, lengths) - y).square().mean()


class Checked(Masked):
    """As CTC heads look at their labels, by a number of Python's."""

    def run(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        if lengths.max().item() > 100:
            raise ValueError("Label values must be <= 100")
        return super().run(x, mask, lengths)


class Cropped(Masked):
    """A number of Python's by which it slices, in a submodule that cannot be opaque: the model itself."""

    def run(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        width = int(lengths.max())
        return torch.cat([self.layers[3](self.layers[2](x))[:, :width], x[:, width:]], 1)


class Counted(Masked):
    """As Longformer picks the tokens that all others look at: how many there are is the size of a tensor."""

    def run(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        if mask.bool().any():
            (places,) = mask.nonzero(as_tuple=True)
            x = x + self.layers[0](x)[places].sum(0)
        else:
            x = x + self.layers[0](x)
        for layer in self.layers[1:]:  # type: ignore[attr-defined]
            x = layer(x)
        return x


def batch(number: int, holes: Sequence[int] = (), length: int = 3, rows: int = 8) -> Inputs:
    """``holes``: the rows whose mask is 0; ``length``: the largest of ``lengths``."""
    generator = torch.Generator().manual_seed(number)
    mask = torch.ones(rows, dtype=torch.long)
    mask[list(holes)] = 0
    lengths = torch.full((rows,), length)
    made = {name: torch.randn(rows, WIDTH, generator=generator) for name in ("x", "y")}
    return made | {"mask": mask, "lengths": lengths}


BATCHES = [batch(0, [1]), batch(1), batch(2, [1]), batch(3, [6]), batch(4, [0, 7]), batch(5, [1])]
"""Cut in two: neither has a hole, the first, the second, both, the first again."""


def steps(
    make: Callable[[], nn.Module], batches: Sequence[Inputs], absent: Sequence[str] = (), **options: Any
) -> list[tuple[Tensor, dict[str, Any], Tensor]]:
    """For each batch but the first, with which it is compiled: the loss, gradients, and the loss of ``evaluate``.

    ``absent``: inputs of which the last rank is given None.
    """
    torch.manual_seed(0)
    topology = options.pop("topology", None) or fxpipe.Topology([("pipe", 2)])
    options = {"boundaries": CUTS, "microbatches": 2, "example_kwargs": batches[0], **options}
    fb = fxpipe.compile(make(), topology, **options)
    lacks = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    found = []
    for one in batches[1:]:
        given = one | dict.fromkeys(absent if lacks else ())
        fb.zero_grad()
        loss = fb(**given)
        gradients = gradients_of(fb.named_parameters())
        found.append((loss, gradients, fb.evaluate(**given, outputs="loss")))
    return found


def assert_right(make: Callable[[], nn.Module], batches: Sequence[Inputs], found: Sequence[Any]) -> None:
    assert_steps([[step[:2] for step in found]], seeded(make), batches[1:], 2, 1e-6)
    for loss, _, evaluated in found:
        assert_same(evaluated, loss, "evaluate", 1e-6)


@pytest.mark.parametrize("make", [Checked, Counted], ids=lambda make: make.__name__)
def test_each_outcome_has_its_stages(make: Any, pool: Pool) -> None:
    """The second rank is given no mask and no lengths."""
    for found in pool.run(steps, make, BATCHES, ("mask", "lengths"), ranks=2):
        assert_right(make, BATCHES, found)


class Unmasked(Masked):
    """As most of transformers' models take a mask: None is one of ones."""

    def run(self, x: Tensor, mask: Tensor | None, lengths: Tensor) -> Tensor:  # type: ignore[override]
        if mask is not None and not mask.all():
            x = x * mask[:, None]
        return self.layers(x)  # type: ignore[no-any-return]


def test_a_later_batch_may_lack_what_forward_asked_about(pool: Pool) -> None:
    given = [batch(0, [1]), batch(1), batch(2) | {"mask": None}, batch(3, [6])]
    for found in pool.run(steps, Unmasked, given, ranks=2):
        assert_right(Unmasked, given, found)


class Picked(Masked):
    """As vision-language models merge features, in a method, and ask about the mask behind it."""

    def merged(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([F.pad(row[:n], (0, WIDTH - n)) for row, n in zip(x, lengths.tolist(), strict=True)])

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(self.merged(x, lengths), y, mask, lengths)


def test_what_is_asked_behind_an_opaque_part_does_not_depend_on_it() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [{"lengths": torch.randint(1, WIDTH, (8,), generator=generator)} for _ in range(4)]
    given = [batch(n, [1] if n % 2 else ()) | one for n, one in enumerate(lengths)]
    assert_right(Picked, given, steps(Picked, given))  # opaque by itself
    rules = {"merged": "whole", **dict.fromkeys(CUTS, "before")}
    assert_right(Picked, given, steps(Picked, given, boundaries=rules))
    assert "if mask.all() else" in str(compiled(Picked(), given[0], rules).stages)


class Normed(Masked):
    """As speech models merge what a conformer makes, whose batch norms write their statistics by then."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def run(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return super().run(self.norm(x), mask, lengths)


def test_what_is_asked_behind_a_batch_norm_does_not_depend_on_it() -> None:
    fb = compiled(seeded(Normed), BATCHES[0], CUTS)
    assert_steps([steps_of(fb, BATCHES[1:4])], seeded(Normed), BATCHES[1:4], 2, 1e-6)
    assert "if mask.all() else" in str(fb.stages)


def test_there_is_a_capture_for_an_outcome_of_a_micro_batch_not_for_each_of_a_batch() -> None:
    fb = compiled(Masked(), BATCHES[0], CUTS)
    for one in BATCHES:
        fb(**one)
    captures = fb._plans.captures
    assert len([guard for guard in captures.guards if guard.values.training]) == 2
    assert "if mask.all() else" in str(fb.stages)
    assert "waits for a GPU" in str(fb.stages)


def test_each_number_takes_a_capture() -> None:
    given = [batch(n, length=n) for n in range(4)]
    assert_right(Cropped, given, steps(Cropped, given))


def refused(make: Callable[[], nn.Module], batches: Sequence[Inputs]) -> str:
    """The message of the step that fails, the last; after it another one is as before."""
    torch.manual_seed(0)
    topology = fxpipe.Topology([("pipe", 2)])
    fb = fxpipe.compile(make(), topology, boundaries=CUTS, microbatches=2, example_kwargs=batches[0])
    for one in batches[:-1]:
        loss = fb(**one)
    with pytest.raises(RunError) as caught:
        fb(**batches[-1])
    assert torch.equal(fb(**batches[-2]), loss)
    return str(caught.value)


def test_a_branch_that_raises_is_a_check_and_raises_in_the_step(pool: Pool) -> None:
    for message in pool.run(refused, Checked, [batch(0), batch(1), batch(2, length=101)], ranks=2):
        assert "forward raised ValueError: Label values must be <= 100" in message


def replicas() -> Any:
    """Steps of replicas whose examples and micro-batches have other outcomes."""
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    mine = replica_of(topology)
    given = [batch(mine + 2 * n, [mine] if n != 1 else [1 - mine][:mine]) for n in range(3)]
    fb = fxpipe.compile(seeded(Masked), topology, boundaries=CUTS, microbatches=2, example_kwargs=given[0])
    return mine, given, steps_of(fb, given)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_replicas_may_have_other_outcomes(pool: Pool) -> None:
    ran = pool.run(replicas, ranks=4)
    batches = {mine: given for mine, given, _ in ran}
    plain = seeded(Masked)
    for step in range(3):
        plain.zero_grad()
        parts = [part for mine in (0, 1) for part in cut(batches[mine][step], 2)]
        wanted, _ = accumulate(lambda _, part: plain(**part), parts)
        for _, _, found in ran:
            loss, gradients = found[step]
            assert_same(loss, wanted, "loss", 1e-6)
            assert_gradients(gradients, plain, 1e-6)


@pytest.mark.parametrize("options", [{"tracer": fxpipe.Tracing(opaque=False)}, {"tracer": "export"}])
def test_it_is_refused_where_that_is_asked_for(options: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r"branches on the value"):
        compiled(Masked(), BATCHES[0], CUTS, **options)


class Trained(Masked):
    """Asks for what its parameters make."""

    def run(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x + 1 if bool(x.sum() > 0) else x
        return self.layers[3](self.layers[1](x))  # type: ignore[no-any-return]


def test_what_parameters_decide_is_no_question() -> None:
    with pytest.raises(TraceError, match=r"value"):
        compiled(Trained(), BATCHES[0], CUTS)


def test_an_input_that_no_rank_is_given_is_named() -> None:
    """The first rank asks what no stage reads, as ``lengths`` here."""
    assert "lengths" in compiled(Checked(), BATCHES[0], CUTS).required_inputs
    fb = compiled(Masked(), BATCHES[0], CUTS)
    with pytest.raises(FxpipeError, match="mask"):
        fb(**BATCHES[1] | {"mask": None})


def test_batches_of_other_sizes_have_other_captures_and_the_same_stages() -> None:
    """Each size is captured as it is, then symbolic: the question of one size is none of another's."""
    rows = [8, 10, 8, 12]
    given = [batch(n, [1] if n % 2 else (), rows=count) for n, count in enumerate(rows)]
    assert_right(Masked, given, steps(Masked, given))


class Gathered(Masked):
    """The last stage runs on the whole batch."""

    def run(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x if mask.all() else x + 1))
        return self.layers[3](fxpipe.stage_boundary(x, gather="batch"))  # type: ignore[no-any-return]


def test_questions_of_gathered_rows_are_refused() -> None:
    """The answer for a group's rows is none of its micro-batches'."""
    topology = fxpipe.Topology([("pipe", 2)])
    with pytest.raises(TraceError, match="branches on the value"):
        fxpipe.compile(Gathered(), topology, microbatches=2, example_kwargs=BATCHES[1])
