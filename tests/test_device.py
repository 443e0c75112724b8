"""The device of a process: what it is called where other ranks read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe
from fxpipe.batch.description import describe
from fxpipe.device import by_shared_name, shared_name, with_shared_names
from fxpipe.errors import RunError
from fxpipe.options import Options
from fxpipe.plain_data import decode, encode
from fxpipe.plan.example import Example, plan_first
from fxpipe.plan.plan import Plan
from fxpipe.plan.plans import Plans
from fxpipe.seeds import RandomState
from fxpipe.stage.modes import Ambient
from tests.gpus import Gpus

OnRank = Callable[[int], torch.device]
Named = torch.device | str | int


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

    def __init__(self, device_of: Callable[[Any], Named]) -> None:
        super().__init__()
        self.first, self.second, self.device_of = nn.Linear(4, 4), nn.Linear(4, 4), device_of

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and (mask & torch.ones(4, dtype=torch.bool, device=self.device_of(x))).all():
            x = 2 * x
        x = fxpipe.stage_boundary(self.first(x))
        position = torch.arange(4, dtype=x.dtype, device=self.device_of(x))
        return self.second(x + position).square().mean()


def planned(device: Named) -> Plan:
    options = Options(tracer="symbolic", microbatches=2)
    plans = Plans.empty(Positions(lambda _: device), options, fxpipe.Topology([("pipe", 2)]), torch.device("cpu"))
    return plan_first(Example(plans, options))[0].first


@pytest.mark.parametrize("named", [lambda device: device, str, lambda device: device.index])
def test_ranks_that_capture_their_own_device_have_the_same_program(
    on_rank: OnRank, named: Callable[[torch.device], Named]
) -> None:
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


# --- on two simulated GPUs

ASKS: dict[str, Callable[[Any], Named]] = {
    "device": lambda x: x.device,
    "text": lambda x: str(x.device),
    "number": lambda x: x.get_device(),
}
PIPE = fxpipe.Topology([("pipe", 2)])


def losses(tracer: str, ask: str, default: bool, masked: bool) -> tuple[torch.device, list[float], list[float]]:
    """Of two steps; and of plain PyTorch's, on the same device."""
    device = fxpipe.init()
    torch.manual_seed(0)
    plain, model = (Positions(ASKS[ask]).to(device) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(8, 4).to(device)
    inputs = {"x": x, "mask": torch.ones(8, 4, dtype=torch.bool, device=device)} if masked else {"x": x}
    torch.set_default_device(device if default else None)
    try:
        forward_backward = fxpipe.compile(model, PIPE, microbatches=2, tracer=tracer, example_kwargs=inputs)
        ours = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        losses, wanted = [], []
        for _ in range(2):
            ours.zero_grad()
            losses.append(forward_backward(**inputs).item())
            ours.step()
            theirs.zero_grad()
            halves = [{name: value[rows] for name, value in inputs.items()} for rows in (slice(4), slice(4, 8))]
            first, second = (plain(**half) / 2 for half in halves)
            first.backward()
            second.backward()
            wanted.append((first + second).item())
            theirs.step()
    finally:
        torch.set_default_device(None)
    return device, losses, wanted


@pytest.mark.parametrize(
    ("tracer", "ask", "default", "masked"),
    [
        ("symbolic", "device", False, False),
        ("export", "device", False, False),
        ("record", "device", False, False),
        ("export", "text", False, False),
        ("record", "number", False, False),
        ("record", "device", True, False),
        ("auto", "device", False, True),  # a question about an input
    ],
)
def test_what_a_rank_captures_on_its_own_device_trains_there(
    gpus: Gpus, tracer: str, ask: str, default: bool, masked: bool
) -> None:
    found = gpus.run(losses, tracer, ask, default, masked)
    assert [device for device, _, _ in found] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert all(losses == wanted for _, losses, wanted in found)


def random_state() -> list[str]:
    return sorted(RandomState([fxpipe.init()]).numbers)


def refused(place: str) -> str:
    fxpipe.init()
    try:
        fxpipe.compile(Positions(ASKS["device"]).to(place), PIPE)
    except RunError as error:
        return str(error)
    return ""


def test_a_model_on_the_cpu_in_a_job_on_gpus_is_refused(gpus: Gpus) -> None:
    for rank, error in enumerate(gpus.run(refused, "cpu")):
        assert error == (
            f"the model's second.bias is on cpu, and this rank computes on cuda:{rank}; write device = "
            'fxpipe.init() at the beginning, and model.to(device), or fxpipe.init(device="cpu") to train on the CPU'
        )


def test_a_model_on_another_rank_s_gpu_is_refused(gpus: Gpus) -> None:
    errors = gpus.run(refused, "cuda:0")
    wrong = "the model's second.bias is on cuda:0, and this rank computes on cuda:1"
    assert errors[1].startswith(wrong)
    assert errors[0].startswith(f"rank 1 (pipe 1) could not compile: RunError: {wrong}")


def on_the_cpu() -> tuple[str, list[str], str]:
    asked, again = fxpipe.init(device="cpu"), fxpipe.init()
    forward_backward = fxpipe.compile(Positions(ASKS["device"]), PIPE, microbatches=2)
    return forward_backward(torch.ones(8, 4)).device.type, [str(asked), str(again)], dist.get_backend()


def too_late() -> str:
    fxpipe.init()
    with pytest.raises(RunError) as caught:
        fxpipe.init(device="cpu")
    return str(caught.value)


def alone() -> str:
    return fxpipe.compile(Positions(ASKS["device"]), PIPE, microbatches=2)(torch.ones(8, 4)).device.type


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def alone_on_meta() -> tuple[int, str]:
    options: Any = {"microbatches": 2, "tracer": "export", "example_args": (torch.ones(8, 4, device="cuda"),)}
    with torch.device("meta"):
        model = Positions(lambda x: x.device)
    previewed = fxpipe.preview(model, PIPE, **options)
    loss = fxpipe.compile(model, PIPE, init_fn=reset, **options)(*options["example_args"])
    return len(previewed.ranks), loss.device.type


TOO_LATE = 'torch.distributed was started for cuda; call fxpipe.init(device="cpu") first'
FOUND: list[tuple[Callable[[], Any], int, Any]] = [
    (random_state, 2, ["cuda", "numpy", "python", "torch"]),  # each rank's device has one name
    (on_the_cpu, 2, ("cpu", ["cpu", "cpu"], "gloo")),
    (too_late, 2, TOO_LATE),
    (alone, 1, "cpu"),  # one process that plays all ranks computes where the model is
    (alone_on_meta, 1, (2, "cuda")),  # and captures where it will make it
]


@pytest.mark.parametrize(("call", "ranks", "wanted"), FOUND)
def test_a_rank_computes_on_the_device_that_was_asked_for(
    gpus: Gpus, call: Callable[[], Any], ranks: int, wanted: Any
) -> None:
    assert gpus.run(call, ranks=ranks) == [wanted] * ranks


@pytest.mark.parametrize("device", ["cuda", torch.device("cpu"), 0])
def test_init_takes_the_cpu_or_nothing_for_a_device(device: Any) -> None:
    with pytest.raises(RunError, match='write device="cpu", or leave it out'):
        fxpipe.init(device=device)
