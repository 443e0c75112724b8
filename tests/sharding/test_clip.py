"""Clipping: the norm is plain PyTorch's on the unsplit model, whoever has which part of it."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxpipe
from fxpipe.distributed.transport import LocalTransport
from fxpipe.errors import RunError
from fxpipe.sharding.clip import clip_grad_norm_
from fxpipe.sharding.gradients import Piece
from fxpipe.sharding.optimizer_class import looks_across
from tests.pool import Pool
from tests.strict_transport import connect, run_strict

ORDERS = [1.0, 2.0, 3.0, math.inf]


def parameters_with_gradients(count: int = 4, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4 + 2 * n, 3, dtype=dtype)) for n in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def piece(parameter: nn.Parameter) -> Piece:
    return Piece("p", parameter, 0, parameter.numel(), parameter.detach(), True, lambda: parameter.grad)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_one_process_it_is_plain_pytorch(order: float, max_norm: float, dtype: torch.dtype) -> None:
    mine, plain = parameters_with_gradients(dtype=dtype), parameters_with_gradients(dtype=dtype)
    norm = clip_grad_norm_([piece(p) for p in mine], LocalTransport(), False, max_norm, order)
    expected = nn.utils.clip_grad_norm_(plain, max_norm, order)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("order", ORDERS)
def test_over_stages_and_replicas_it_is_plain_pytorch_and_the_same_bits_on_every_rank(order: float) -> None:
    """The last stage's parameters have no gradient."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 3).requires_grad_(False))

    def body(rank: int) -> Tensor:
        topology = fxpipe.Topology([("pipe", 3), ("data", 2)])
        options: Any = {"loss_fn": nn.functional.mse_loss, "boundaries": ["1", "2"], "microbatches": 1, "zero": 1}
        forward_backward = fxpipe.compile(built(), topology, **options)
        forward_backward(torch.ones(2, 3), target=torch.zeros(2, 3))
        return forward_backward.clip_grad_norm_(0.01, order)

    plain = built()
    nn.functional.mse_loss(plain(torch.ones(2, 3)), torch.zeros(2, 3)).backward()
    norms = run_strict(body, 6)
    torch.testing.assert_close(norms[0], nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order))
    assert all(torch.equal(norm, norms[0]) for norm in norms)


@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.ones(2))]])
def test_without_gradients_the_norm_is_zero(parameters: list[nn.Parameter]) -> None:
    norm = clip_grad_norm_([piece(p) for p in parameters], LocalTransport(), False, 1.0)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(parameters, 1.0))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("order", ORDERS)
def test_inf_and_nan_are_an_error_if_asked_and_otherwise_as_in_pytorch(value: float, order: float) -> None:
    mine, plain = parameters_with_gradients(2), parameters_with_gradients(2)
    for parameters in (mine, plain):
        assert parameters[0].grad is not None
        parameters[0].grad[0, 0] = value
    with pytest.raises(RunError, match="cannot be clipped"):
        clip_grad_norm_([piece(p) for p in mine], LocalTransport(), False, 1.0, order, error_if_nonfinite=True)
    norm = clip_grad_norm_([piece(p) for p in mine], LocalTransport(), False, 1.0, order)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain, 1.0, order), equal_nan=True)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


@pytest.mark.parametrize(("value", "rank"), [(math.inf, 0), (math.nan, 0), (math.nan, 2), (None, 0)])
def test_the_largest_gradient_of_all_ranks_is_found_and_an_inf_or_nan_of_any(value: float | None, rank: int) -> None:
    def body(mine: int) -> Tensor:
        topology = fxpipe.Topology([("pipe", 3)])
        transport = connect(topology)
        (parameter,) = parameters_with_gradients(1)
        assert parameter.grad is not None
        parameter.grad[0, 0] = 10.0 + mine
        if value is not None and mine == rank:
            parameter.grad[0, 0] = value
        return clip_grad_norm_([piece(parameter)], transport, False, 1.0, math.inf)

    expected = torch.tensor(12.0 if value is None else value)
    for norm in run_strict(body, 3):
        torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)


def test_bfloat16_parameters_with_float32_gradients() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_([piece(parameter)], LocalTransport(), False, 3.0).item() == 6.0
    torch.testing.assert_close(parameter.grad, torch.full((4,), 1.5))


LISTS: dict[str, Callable[[Any, Any], Any]] = {
    "generator": lambda model, one: one.parameters(),
    "list": lambda model, one: list(one.parameters()),
    "named": lambda model, one: [parameter for _, parameter in one.named_parameters()],
    "groups": lambda model, one: one.optimizer(torch.optim.SGD, lr=1.0).param_groups[0]["params"],
    "model": lambda model, one: model.parameters(),
    "trainable": lambda model, one: [parameter for parameter in model.parameters() if parameter.requires_grad],
}


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020, algorithm 2) as timm has it: by the norm over all gradients that it is given."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        gradients = [parameter.grad for parameter in group["params"]]
        clip = torch.stack([torch.linalg.vector_norm(one) for one in gradients]).norm().clamp(min=1.0)
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            state = self.state[parameter]
            mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(gradient / clip, 0.1)
            square = state.setdefault("square", torch.zeros_like(parameter)).lerp_((gradient / clip) ** 2, 1e-3)
            update = mean / (square.sqrt() + 1e-6)
            parameter.sub_(group["lr"] * parameter.norm() / update.norm() * update)


class Lars(torch.optim.Optimizer):
    """Layer-wise rates (You et al., 2017), with the norms of all layers taken at once and used one by one."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if parameters := [one for one in group["params"] if one.grad is not None]:
                gradients = [one.grad for one in parameters]
                ratios = torch.stack(torch._foreach_norm(parameters)) / torch.stack(torch._foreach_norm(gradients))
                for one, ratio in zip(parameters, ratios, strict=True):
                    one.sub_(group["lr"] * ratio * one.grad)


class LateScale(torch.optim.Optimizer):
    """One rate for all parameters, by the norm over all gradients, from the sixth step on, as Prodigy has one."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "scale": 1.0, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [one.grad for one in group["params"]]
            group["steps"] += 1
            if group["steps"] > 5:
                group["scale"] = sum(gradient.square().sum().item() for gradient in gradients) ** 0.5
            for one, gradient in zip(group["params"], gradients, strict=True):
                one.sub_(group["lr"] / group["scale"] * gradient)


class OfVectors(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            if one.ndim > 1:
                raise ValueError("vectors alone")
        super().step(closure)


@pytest.mark.parametrize(("kind", "known"), [(Lamb, True), (LateScale, True), (Lars, False), (OfVectors, None)])
def test_it_is_tried_whether_a_class_steps_by_the_gradients_of_others(kind: Any, known: bool | None) -> None:
    assert looks_across(kind, {"lr": 0.1}) is known


def test_one_that_cannot_be_tried_is_said_to_be_unproven(capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        options: Any = {"boundaries": ["1"], "microbatches": 1, "loss_fn": nn.functional.mse_loss}
        fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), **options).optimizer(OfVectors, lr=0.1)

    run_strict(body, 2)
    assert "OfVectors could not be tried on two small tensors" in capsys.readouterr().err


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("foreach", [None, True])
def test_torchs_own_is_refused_where_a_rank_has_a_part_of_the_model(data: int, foreach: bool | None) -> None:
    def gradients(size: int) -> tuple[nn.Module, fxpipe.ForwardBackward]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        topology = fxpipe.Topology([("pipe", 2), ("data", size)])
        forward_backward = fxpipe.compile(
            model, topology, boundaries=["1"], microbatches=1, loss_fn=lambda output, target: output.mean()
        )
        forward_backward(torch.ones(2, 2), target=None)
        return model, forward_backward

    def body(rank: int) -> Tensor:
        model, forward_backward = gradients(data)
        for listed in LISTS.values():
            with pytest.raises(fxpipe.RunError, match=r"clip_grad_norm_\(max_norm\)"):
                nn.utils.clip_grad_norm_(listed(model, forward_backward), 1.0, foreach=foreach)
        with pytest.raises(fxpipe.RunError, match="Lamb steps a parameter by the gradients of others"):
            forward_backward.optimizer(Lamb)
        held = [parameter.grad for parameter in forward_backward.parameters()]
        assert all(type(copy.deepcopy(one) + one.norm()) is Tensor for one in held)  # and to others it is a tensor
        with torch.device("cpu"), pytest.raises(fxpipe.RunError, match=r"clip_grad_norm_\(max_norm\)"):
            nn.utils.clip_grad_norm_(forward_backward.parameters(), 1.0, foreach=foreach)  # under a mode
        first = next(forward_backward.parameters())
        nn.utils.clip_grad_norm_(first, 10.0)  # of one that lies here
        norms = forward_backward.grad_norms()
        assert list(norms) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        every = torch.stack(list(norms.values())).norm().float()
        torch.testing.assert_close(every, forward_backward.clip_grad_norm_(1e9))
        return forward_backward.clip_grad_norm_(1.0)

    whole = nn.utils.clip_grad_norm_(gradients(1)[1].parameters(), 1.0)  # one process has all of it
    for norm in run_strict(body, 2 * data):
        torch.testing.assert_close(norm, whole)


# --- norms of a part of the model, and of each parameter ---


class ActorCritic(nn.Module):
    """Two heads on a trunk; the actor's weight is the trunk's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.actor, self.critic = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.actor.weight = self.trunk.weight
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.trunk(x).tanh())
        return self.actor(h).square().mean() + self.critic(h).square().mean()


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
PARTS = {"actor": ["trunk.*", "actor.*"], "critic": ["critic.*"]}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zero", [0, 1])
def test_parts_of_the_model_are_clipped_apart_and_every_parameter_has_its_norm(order: float, zero: int) -> None:
    plain, wanted = ActorCritic(), dict[str, Tensor]()
    plain(X).backward()
    norms = {
        name: torch.zeros(()) if p.grad is None else torch.linalg.vector_norm(p.grad, order)
        for name, p in plain.named_parameters()
    }
    for part in PARTS.values():
        own = [p for name, p in plain.named_parameters() if any(fnmatch.fnmatch(name, one) for one in part)]
        wanted[part[0]] = nn.utils.clip_grad_norm_(own, 0.01, order)
    clipped = {name: p.grad for name, p in plain.named_parameters()}

    def body(rank: int) -> dict[str, Tensor]:
        topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
        forward_backward = fxpipe.compile(ActorCritic(), topology, microbatches=2, zero=zero)
        forward_backward(X.chunk(2)[rank % 2])
        found = forward_backward.grad_norms(norm_type=order)
        assert list(forward_backward.grad_norms("critic.*")) == ["critic.weight", "critic.bias"]
        assert forward_backward.grad_norms("actor.weight").keys() == {"trunk.weight"}
        with pytest.raises(fxpipe.RunError, match=r"'critc\.\*', which fits no parameter"):
            forward_backward.grad_norms("critc.*")
        with pytest.raises(fxpipe.RunError, match="holds parameters, which only some ranks have"):
            forward_backward.grad_norms(list(forward_backward.parameters()))
        own = [p for name, p in forward_backward.named_parameters() if name.startswith("critic")]
        for part, given in ((PARTS["actor"], PARTS["actor"]), (PARTS["critic"], own)):
            norm = forward_backward.clip_grad_norm_(0.01, order, parameters=given)
            torch.testing.assert_close(norm, wanted[part[0]])
        for name, parameter in forward_backward.named_parameters():
            if zero == 0 and parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, clipped[name])
        return found

    found = run_strict(body, 4)
    assert all(list(one) == list(norms) and torch.equal(one[name], found[0][name]) for one in found for name in norms)
    for name, norm in norms.items():
        torch.testing.assert_close(found[0][name].float(), norm, msg=name)


def test_norms_by_hand_are_this_ranks_and_a_line_says_so_once(pool: Pool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    (first, told), (second, other) = pool.run(by_hand, copy.deepcopy(model), ranks=2)
    optimizer = Lars(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), X).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close({**first, **second}[name], tensor)
    assert told.count("forward_backward.grad_norms() has those of all of the model's parameters") == 1
    assert "grad_norms" not in other


def by_hand(model: nn.Module) -> tuple[dict[str, Tensor], str]:
    forward_backward = fxpipe.compile(
        model, fxpipe.Topology([("pipe", 2)]), boundaries=["2"], microbatches=1, loss_fn=nn.functional.mse_loss
    )
    optimizer = forward_backward.optimizer(Lars)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        for _ in range(2):
            optimizer.zero_grad()
            forward_backward(X, target=X)
            gradients = [parameter.grad for parameter in forward_backward.parameters()]
            assert all(type(one) is Tensor for one in torch.stack(torch._foreach_norm(gradients)))
            assert sum(one.norm().item() ** 2 for one in gradients) > 0
            optimizer.step()
    return forward_backward.state_dict(), told.getvalue()


def columns(stage: nn.Module, mesh: Any) -> None:
    for part in stage.modules():
        if isinstance(part, nn.Linear):
            parallelize_module(part, mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))


SPREAD = {"zero=3": ("data", {"zero": 3}), "tensor": ("tensor", {"parallelize": columns})}


def norm_of_spread(how: str) -> float:
    axis, options = SPREAD[how]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    batch = {"input": torch.ones(2, 4), "target": torch.zeros(2, 2)}
    forward_backward = fxpipe.compile(
        model,
        fxpipe.Topology([("pipe", 2), (axis, 2)]),
        boundaries=["1"],
        microbatches=1,
        loss_fn=nn.functional.mse_loss,
        example_kwargs=batch,
        **options,  # type: ignore[arg-type]
    )
    forward_backward(**batch)
    for foreach in (None, False):
        with pytest.raises(RunError, match=r"clip_grad_norm_\(max_norm\)"):
            nn.utils.clip_grad_norm_(list(forward_backward.parameters()), 1.0, foreach=foreach)
    every = torch.stack(list(forward_backward.grad_norms().values())).norm()
    norm = forward_backward.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, every.float())
    return norm.item()


@pytest.mark.parametrize("how", SPREAD)
def test_torchs_own_is_refused_of_what_is_spread_over_a_mesh(how: str, pool: Pool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.functional.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 2)).backward()
    whole = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert pool.run(norm_of_spread, how, ranks=4) == pytest.approx([whole] * 4)
