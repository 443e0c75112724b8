"""The device of a process: what it is called where other ranks read it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.device import by_shared_name, shared_name, with_shared_names
from fxpipe.graph.modes import Ambient
from fxpipe.graph.plain_data import decode, encode
from fxpipe.options import Options
from fxpipe.plan.example import Example, plan_first
from fxpipe.plan.inputs.batch import describe
from fxpipe.plan.plan import Plan
from fxpipe.plan.planner import Planner

OnRank = Callable[[int], torch.device]
Named = Callable[[torch.device], torch.device | str | int]


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> OnRank:
    """From its call on this process computes on the GPU of that number."""

    def on_rank(rank: int) -> torch.device:
        device = torch.device("cuda", rank)
        monkeypatch.setattr("fxpipe.device.current", lambda: device)
        return device

    return on_rank


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "cuda:11", "meta"])
def test_a_device_that_is_not_the_rank_s_own_keeps_its_name(on_rank: OnRank, name: str) -> None:
    on_rank(1)
    assert shared_name(torch.device(name)) == name
    assert by_shared_name(name) == torch.device(name)
    assert with_shared_names(f"x.to({name})") == f"x.to({name})"


def test_without_an_accelerator_every_device_keeps_its_name() -> None:
    for name in ("cpu", "cuda:1", "cuda"):
        assert shared_name(torch.device(name)) == name
        assert by_shared_name(name) == torch.device(name)


def test_a_device_that_is_sent_arrives_as_the_receiver_s_own(on_rank: OnRank) -> None:
    message = encode({"own": on_rank(0), "host": torch.device("cpu"), "other": torch.device("cuda", 5)})
    received = decode(message, "rank 0"), on_rank(1), decode(message, "rank 0")
    assert received[0]["own"] == torch.device("cuda", 0)
    assert received[2] == {"own": received[1], "host": torch.device("cpu"), "other": torch.device("cuda", 5)}


def test_ranks_describe_a_batch_that_names_their_own_devices_alike(on_rank: OnRank) -> None:
    def message(device: torch.device) -> bytes:
        return encode(describe({"device": device, "more": {"device": device}}, exact=True))

    assert message(on_rank(0)) == message(on_rank(1))


def test_ranks_have_the_same_settings_where_their_own_device_is_the_default(on_rank: OnRank) -> None:
    def settings(device: torch.device) -> Ambient:
        with device:
            return Ambient.now()

    first, second = settings(on_rank(0)), settings(on_rank(1))
    assert first == second
    assert first.difference(Ambient.now()) == "torch.get_default_device(), 'cuda' and 'cpu'"


class Positions(nn.Module):
    """Has a device in its graph."""

    def __init__(self, device: torch.device | str | int) -> None:
        super().__init__()
        self.first, self.second, self.device = nn.Linear(4, 4), nn.Linear(4, 4), device

    def forward(self, x: Tensor) -> Tensor:
        x = fxpipe.stage_boundary(self.first(x))
        position = torch.arange(4, dtype=x.dtype, device=self.device)
        return self.second(x + position).square().mean()


def planned(device: torch.device | str | int) -> Plan:
    options = Options(tracer="symbolic", microbatches=2)
    planner = Planner.empty(Positions(device), options, fxpipe.Topology([("pipe", 2)]), torch.device("cpu"))
    return plan_first(Example(planner, options)).first


@pytest.mark.parametrize("named", [lambda device: device, str, lambda device: device.index])
def test_ranks_that_capture_their_own_device_have_the_same_program(on_rank: OnRank, named: Named) -> None:
    first, second = (planned(named(on_rank(rank))).description for rank in (0, 1))
    assert first == second
    assert "device: cuda}" in second


def test_each_rank_runs_what_it_captured_on_its_own_device(on_rank: OnRank) -> None:
    """``cuda`` in what is compared; in what runs the very device, with which a model may compare others."""
    code = "".join(str(stage.forward) for stage in planned(on_rank(1)).graph)
    assert "device(type='cuda', index=1)" in code


def test_a_device_that_is_one_rank_s_own_alone_tells_the_programs_apart(on_rank: OnRank) -> None:
    hard_coded = torch.device("cuda", 0)
    programs = [planned(hard_coded).description for _ in map(on_rank, (0, 1))]
    assert "device: cuda}" in programs[0]
    assert "device: cuda:0}" in programs[1]
