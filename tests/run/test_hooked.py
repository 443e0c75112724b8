"""Hooks that write parameters in the backward: torch's "optimizer step fused into the backward", micro-batch by
micro-batch, against a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.pool import Pool, RankFailed

ROWS, WIDTH = 8, 4


class Towers(nn.Module):
    """Its backward does not read the embedding: torch cannot see that it was written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.words(ids).tanh(), name="body")
        return self.head(self.body(h).tanh()).square().mean()


def stepping(parameters: Iterable[nn.Parameter]) -> None:
    """As torch's tutorial does it: an optimizer for each parameter, which steps as soon as the gradient is there."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.5) for parameter in parameters}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def batches() -> list[Tensor]:
    return [torch.randint(10, (ROWS,), generator=torch.Generator().manual_seed(step)) for step in range(3)]


def plain(parts: int, hooked: Callable[[nn.Module], Iterable[nn.Parameter]]) -> dict[str, Tensor]:
    model = Towers()
    stepping(hooked(model))
    for batch in batches():
        for part in batch.chunk(parts):
            (model(part) / parts).backward()
    return model.state_dict()


def trained(
    parts: int, hooked: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters, **options: Any
) -> dict[str, Tensor]:
    topology = fxpipe.Topology([("pipe", 2)])
    forward_backward = fxpipe.compile(Towers(), topology, microbatches=parts, **options)
    stepping(hooked(forward_backward.module))
    for batch in batches():
        forward_backward(batch)
    return copy.deepcopy(forward_backward.module.state_dict())


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_optimizers_that_step_in_the_backward_of_the_whole_batch_do_as_in_plain_pytorch(schedule: Any) -> None:
    compare(trained(1, schedule=schedule), plain(1, nn.Module.parameters))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_a_forward_that_lacks_the_step_of_the_micro_batch_before_is_refused(schedule: Any, options: Any) -> None:
    told = r"a hook has written parameter '\w+.weight' in the backward .* forward of micro-batch 1 .* microbatches=1"
    with pytest.raises(fxpipe.RunError, match=told):
        trained(2, schedule=schedule, **options)


def test_a_table_whose_forwards_follow_the_steps_does_as_in_plain_pytorch() -> None:
    """The last stage of 1F1B alternates; so it may be stepped by micro-batches, where the first stage is not."""

    def hooked(module: nn.Module) -> list[nn.Parameter]:
        return [parameter for name, parameter in module.named_parameters() if not name.startswith("words")]

    compare(trained(2, hooked), plain(2, hooked))


def on_both_ranks() -> None:
    fxpipe.init()
    trained(2, placement={"words": "all", "body": 1})


@pytest.mark.processes
def test_a_stage_of_several_ranks_whose_copies_would_drift_apart_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"has written parameter 'words.weight' .* the ranks that hold it drift apart"):
        pool.run(on_both_ranks, ranks=2)
