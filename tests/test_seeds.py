"""Seeds: one for each stage, micro-batch, step and replica, and generators that are left as they were."""

from __future__ import annotations

import hashlib
import itertools
import random
import struct

import numpy as np
import pytest
import torch

from fxpipe.seeds import seed_of, seeded

HERE = torch.get_default_device()


def test_every_step_stage_micro_batch_and_replica_has_a_seed_of_its_own() -> None:
    seeds = [
        seed_of(base, *rest)
        for base in (0, 1, 2**64 - 1)
        for rest in itertools.product(range(5), range(6), range(7), range(3))
    ]
    assert len(set(seeds)) == len(seeds) == 3 * 5 * 6 * 7 * 3


@pytest.mark.parametrize("base", [42, -1, 2**64 + 5])
def test_a_seed_is_63_bits_of_a_hash_of_the_five_numbers_whatever_torchs_seed_is(base: int) -> None:
    words = b"".join(struct.pack("<Q", number) for number in (base % 2**64, 3, 1, 4, 1))
    eight = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    assert seed_of(base, 3, 1, 4, 1) == eight // 2
    assert 0 <= seed_of(base, 3, 1, 4, 1) < 2**63
    torch.Generator().manual_seed(seed_of(base, 3, 1, 4, 1))  # torch takes it


def test_inside_numbers_follow_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    with seeded(7, HERE):
        first = torch.rand(4)
    torch.manual_seed(2)
    torch.rand(3)
    with seeded(7, HERE):
        assert torch.equal(torch.rand(4), first)
    with seeded(8, HERE):
        assert not torch.equal(torch.rand(4), first)


def test_inside_the_cpu_draws_as_after_manual_seed_and_no_other_device_is_seeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        wanted = torch.rand(4)
    seeded_gpus: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded_gpus.append)
    with seeded(7, HERE):
        assert torch.equal(torch.rand(4), wanted)
    assert seeded_gpus == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_inside_the_gpu_draws_as_after_manual_seed_and_outside_it_goes_on() -> None:
    gpu = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.manual_seed(7)
    wanted = torch.rand(4, device=gpu)
    torch.manual_seed(1)
    expected = torch.rand(4, device=gpu)
    torch.manual_seed(1)
    with seeded(7, gpu):
        assert torch.equal(torch.rand(4, device=gpu), wanted)
    assert torch.equal(torch.rand(4, device=gpu), expected)


def test_outside_the_generator_goes_on_as_if_nothing_had_been_drawn_after_an_error_too() -> None:
    torch.manual_seed(1)
    expected = torch.rand(6)
    torch.manual_seed(1)
    before = torch.rand(3)
    with pytest.raises(RuntimeError, match="size"), seeded(7, HERE), seeded(8, HERE):
        torch.rand(5) @ torch.rand(4)
    assert torch.equal(torch.cat([before, torch.rand(3)]), expected)


def test_pythons_and_numpys_numbers_are_seeded_inside_and_go_on_outside() -> None:
    random.seed(7)
    np.random.seed(7)
    inside = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    wanted = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    with seeded(7, HERE, python=True):
        assert (random.random(), np.random.rand()) == inside
    assert (random.random(), np.random.rand()) == wanted
