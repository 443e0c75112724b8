"""Row places: in which dimension gathered values have their rows, as their shapes for two numbers of rows show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.capture import captures
from tests.harness import gradients_of, replica_of, strict
from tests.whole.gathered import Contrastive, batch, model
from tests.whole.test_gathered import assert_alike, on_the_whole_batch

WIDTH = 4
"""The towers' features: as many as a micro-batch has rows."""
PIPE_4, TWO_BY_TWO = Topology([("pipe", 4)]), Topology([("pipe", 2), ("data", 2)])


class Transposed(Contrastive):
    """What it gathers of the image lies features × rows; of the text in three dimensions, the rows last."""

    def forward(self, image: Tensor, text: Tensor) -> Any:
        v, t = self.towers(image, text)
        v, t = stage_boundary((v.T, t.T[None] * torch.ones(2, 1, 1)), name="loss", gather=self.gather)
        return self.loss(v.T, t[0].T)


class TransposedOverReplicas(Transposed):
    gather = "global"


def step(kind: type[Contrastive], topology: Topology, rows: tuple[int, ...], m: int, options: dict[str, Any]) -> Any:
    forward_backward = fxpipe.compile(model(kind), topology, microbatches=m, **options)
    replica = replica_of(topology) if len(rows) > 1 else 0
    loss = forward_backward(*(tensor.split(list(rows))[replica] for tensor in batch(sum(rows))))
    return [loss], gradients_of(forward_backward.named_parameters())


@pytest.mark.parametrize(
    ("tracer", "shown"), [("symbolic", True), ("symbolic", False), ("export", True), ("record", True)]
)
def test_rows_are_found_where_another_dimension_has_their_size(tracer: str, shown: bool) -> None:
    """In the first step, and by every tracer; symbolic captures before it has seen a batch."""
    example = {"example_args": batch(4 * WIDTH)} if shown else {}
    got = step(Transposed, PIPE_4, (4 * WIDTH,), 4, {"tracer": tracer, **example})
    assert_alike([got], on_the_whole_batch(4 * WIDTH))


class Looking(nn.Linear):
    """Looks at numbers, which fake tensors have not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() < 1e9 else x / x.sum())


class TransposedLooking(Transposed):
    def __init__(self) -> None:
        super().__init__()
        text, self.text = self.text, Looking(5, 4)
        self.text.load_state_dict(text.state_dict())


def test_what_cannot_run_without_numbers_is_known_from_its_capture() -> None:
    """Such a module is a call of a whole, of which the capture has seen what it makes."""
    options = {"tracer": "record", "example_args": batch(4 * WIDTH)}
    got = step(TransposedLooking, PIPE_4, (4 * WIDTH,), 4, options)
    assert_alike([got], on_the_whole_batch(4 * WIDTH))


def test_one_micro_batch_of_each_replica_is_no_doubt() -> None:
    options = {"tracer": "symbolic", "example_args": batch(WIDTH)}
    results = strict(0)(4, step, TransposedOverReplicas, TWO_BY_TWO, (WIDTH, WIDTH), 1, options)
    assert_alike(results, on_the_whole_batch(2 * WIDTH))


class Pooled(Contrastive):
    """Images of any length, by which it multiplies; of what it gathers, one lies features × rows, one rows × features.

    Where the length is no number of Python's, the products before have other names.
    """

    def forward(self, image: Tensor, text: Tensor) -> Any:
        length = image.shape[1] * 2
        v, t = self.towers(image.mean(1), text)
        v, t = stage_boundary((v.T * (length * 2), t * 3.0), name="loss", gather=self.gather)
        return self.loss(v.T / v.shape[1], t)


def test_rows_are_found_in_the_capture_that_the_plan_was_made_of() -> None:
    """A later one, with a symbolic length, holds for the first one's batches, too, and calls its values otherwise."""
    image, text = batch(4 * WIDTH)
    images = {length: image[:, None] * torch.linspace(1, 2, length).double()[None, :, None] for length in (5, 7, 9)}
    compiled, plain = model(Pooled), model(Pooled)
    forward_backward = fxpipe.compile(compiled, PIPE_4, microbatches=4, tracer="export", example_args=(images[5], text))
    for length in (7, 9, 5):
        loss = forward_backward(images[length], text)
        torch.testing.assert_close(loss, plain(images[length], text).detach(), msg=f"length {length}")


class Plain(Contrastive):
    gather = None


@pytest.mark.parametrize(("kind", "microbatches", "runs"), [(Plain, 4, 0), (Contrastive, 1, 0), (Contrastive, 4, 2)])
def test_nothing_is_run_for_it_where_nothing_is_gathered_or_a_group_is_one_micro_batch(
    kind: type[Contrastive], microbatches: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    shapes_of = captures.shapes_of

    def watched(program: Any, example: Any, *given: Any) -> Any:
        rows.append(example["image"].shape[0])
        return shapes_of(program, example, *given)

    monkeypatch.setattr(captures, "shapes_of", watched)
    forward_backward = fxpipe.compile(model(kind), PIPE_4, microbatches=microbatches)
    for size in (8, 8, 9):
        forward_backward(*batch(size))
    assert rows == [2, 4][:runs]
