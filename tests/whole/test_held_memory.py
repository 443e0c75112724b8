"""What a rank holds, and what is under way, over many steps; buffers whose memory repeats."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from tests.pool import Pool
from tests.replicas import PAIR, SQUARE, compiled_alone, linear
from tests.strict_transport import run_strict

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


def test_an_expanded_buffer_is_loaded_and_one_that_would_differ_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> Tensor:
        step = fxpipe.compile(model := Expanded(2.0), SQUARE, microbatches=2)
        fxpipe.save(tmp_path, step, None, step=1)
        state = step.state_dict(full=True)
        step.load_state_dict(state | {"scale": torch.full((2, 8), 3.0)})
        assert rank > 1 or torch.equal(model.scale, torch.full((2, 8), 3.0))
        fxpipe.load(tmp_path, step)
        if rank < 2:
            with pytest.raises(fxpipe.RunError, match="repeats one memory, as expand"):
                step.load_state_dict(state | {"scale": torch.arange(16.0).view(2, 8)})
        return step.state_dict(full=True)["scale"]

    assert all(torch.equal(scale, torch.full((2, 8), 2.0)) for scale in run_strict(body, 4))
