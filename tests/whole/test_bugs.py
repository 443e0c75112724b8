"""Bugs that once bit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.strict_transport import run_strict

TWO = fxpipe.Topology([("pipe", 2)])


class Two(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
        h = fxpipe.stage_boundary(self.a(x * self.scale))
        return self.b(-h if mode == "negative" else h).square().mean()


class Pooled(nn.Module):
    """Returns a row per sample, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (positions, rows, 4) -> (rows, 3)
        return self.b(fxpipe.stage_boundary(self.a(x)).mean(0))


def test_a_rank_lets_go_of_the_other_stages_parameters() -> None:
    def body(rank: int) -> list[bool]:
        model = Two()
        alive = [weakref.ref(parameter) for parameter in (model.a.weight, model.b.weight, model.scale)]
        forward_backward = fxpipe.compile(model, TWO, microbatches=2)
        forward_backward(torch.ones(4, 4))
        gc.collect()
        return [reference() is not None for reference in alive]

    assert run_strict(body, 2) == [[True, False, True], [False, True, False]]


def test_callables_let_go_of_the_other_stages_parameters() -> None:
    def body(rank: int) -> list[bool]:
        stages = {"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))}
        end: dict[str, Any] = {**stages, "end": lambda y: y.mean()}
        graph = fxpipe.StageGraph.from_callables(end, [("a", "b"), ("b", "end")], {"a": ["x"]})
        alive = [weakref.ref(stages["a"].weight), weakref.ref(stages["b"][0].weight)]
        forward_backward = fxpipe.compile(graph, TWO, microbatches=2, placement={"a": 0, "b": 1, "end": 1})
        del graph, end, stages
        forward_backward(torch.ones(4, 4))
        gc.collect()
        return [reference() is not None for reference in alive]

    assert run_strict(body, 2) == [[True, False], [False, True]]


def test_a_later_capture_that_fails_on_one_rank_fails_on_all() -> None:
    class Picky(Two):
        picky = False

        def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
            if self.picky and mode == "other":
                raise ValueError("not on this rank")
            return super().forward(x, mode)

    def body(rank: int) -> str:
        model = Picky()
        model.picky = rank == 1
        forward_backward = fxpipe.compile(model, TWO, microbatches=2)
        forward_backward(torch.ones(4, 4))
        with pytest.raises(fxpipe.FxpipeError) as error:
            forward_backward(torch.ones(4, 4), mode="other")
        forward_backward(torch.ones(4, 4))
        return str(error.value)

    assert all("not on this rank" in text for text in run_strict(body, 2))


def test_constants_made_with_different_seeds_are_told_apart() -> None:
    class Noisy(Two):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.randn(4)  # registered nowhere

        def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
            return super().forward(x + self.noise, mode)

    def body(rank: int) -> None:
        torch.manual_seed(rank)
        fxpipe.compile(Noisy(), TWO, microbatches=2)

    with pytest.raises(fxpipe.RunError, match=r"different programs(.|\n)*constant \[4\]"):
        run_strict(body, 2)


def test_an_option_that_one_rank_lacks_is_told() -> None:
    def body(rank: int) -> None:
        fxpipe.compile(Two(), TWO, microbatches=2, loss_weight=(lambda x: 1.0) if rank else None)

    with pytest.raises(
        fxpipe.RunError, match=r"different programs(.|\n)*loss_weight not given(.|\n)*loss_weight given"
    ):
        run_strict(body, 2)


def test_a_stage_of_callables_unfrozen_before_compile_is_trained() -> None:
    first = nn.Linear(4, 4).requires_grad_(False)
    graph = fxpipe.StageGraph.from_callables({"a": first, "b": lambda y: y.mean()}, [("a", "b")], {"a": ["x"]})
    first.requires_grad_(True)
    fxpipe.compile(graph, TWO, microbatches=2)(torch.ones(4, 4))
    assert first.weight.grad is not None


@pytest.mark.parametrize("autocast", [False, True])
def test_a_batch_of_other_strides_or_under_autocast_is_another_kind(autocast: bool) -> None:
    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(Two(), TWO, microbatches=2)
        x = torch.arange(16.0).view(4, 4)
        losses = [forward_backward(x)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(forward_backward(x.t().contiguous().t()))
        return losses

    for one, other in run_strict(body, 2):
        assert torch.allclose(one, other.float(), rtol=0.05)


def test_parameters_keep_the_models_order_and_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._model = nn.Embedding(5, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self._model.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self._model(x)
            for layer in self.layers:
                h = layer(h)
            return self.head(fxpipe.stage_boundary(h)).mean()

    model = Named()
    forward_backward = fxpipe.compile(model, TWO, microbatches=2)
    assert [name for name, _ in forward_backward.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(forward_backward.state_dict()) == list(model.state_dict())


def test_a_rank_module_is_not_cast_behind_the_stages_backs() -> None:
    forward_backward = fxpipe.compile(Two(), TWO, microbatches=2)
    with pytest.raises(fxpipe.RunError, match=r"before fxpipe.compile"):
        forward_backward.module.double()


def test_evaluate_weighs_a_loss_as_training_does() -> None:
    class Masked(Two):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            errors = self.b(fxpipe.stage_boundary(self.a(x))).square().mean(1)
            return (errors * mask).sum() / mask.sum()

    forward_backward = fxpipe.compile(Masked(), TWO, microbatches=3, loss_weight=lambda x, mask: mask.sum())
    x, mask = torch.randn(6, 4), torch.tensor([1.0, 1, 0, 0, 1, 0])
    assert torch.allclose(forward_backward.evaluate(x, mask), forward_backward(x, mask))


def test_evaluate_joins_rows_where_they_are() -> None:
    model = Pooled()
    forward_backward = fxpipe.compile(
        model,
        TWO,
        loss_fn=lambda y, t: (y - t).mean(),
        loss_weight=lambda x, target: target.sum(),  # of no use where there is no target
        microbatches=2,
        batch_dim={"x": 1},
    )
    x = torch.randn(5, 4, 4)
    assert torch.allclose(forward_backward.evaluate(x), model(x), atol=1e-6)


def test_evaluate_gives_an_output_without_rows_for_each_micro_batch() -> None:
    class Summed(Two):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.b(fxpipe.stage_boundary(self.a(x))).sum(0)

    model = Summed()
    forward_backward = fxpipe.compile(model, TWO, loss_fn=lambda y, t: y.mean(), microbatches=2)
    x = torch.randn(6, 4)
    torch.testing.assert_close(list(forward_backward.evaluate(x)), [model(part).detach() for part in x.chunk(2)])


def test_evaluate_needs_no_table_of_the_users_own() -> None:
    table = fxpipe.schedules.build("gpipe", [(0, 1)], 4)
    model = Two()
    forward_backward = fxpipe.compile(model, TWO, microbatches=4, schedule=table)
    x = torch.randn(2, 4)
    assert torch.allclose(forward_backward.evaluate(x), model(x))


def test_gradients_of_several_calls_add_up_bit_for_bit_for_a_new_kind_of_batch() -> None:
    torch.manual_seed(0)
    model = Two()
    batches = [torch.randn(rows, 4) for rows in (4, 6, 8)]
    for x in batches:
        for part in x.tensor_split(2):
            (model(part) * (len(part) / len(x))).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    forward_backward = fxpipe.compile(model, TWO, microbatches=2)
    for x in batches:
        forward_backward(x)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_compiling_again_with_another_placement_says_who_has_the_parameters() -> None:
    def body(rank: int) -> None:
        model = Two()
        fxpipe.compile(model, TWO, microbatches=2)
        fxpipe.compile(model, TWO, microbatches=2, placement={"a": 1, "b": 0})

    with pytest.raises(fxpipe.RunError, match=r"an earlier fxpipe.compile gave it to another rank"):
        run_strict(body, 2)


def test_a_closed_one_says_so() -> None:
    def body(rank: int) -> str:
        forward_backward = fxpipe.compile(Two(), TWO, microbatches=2)
        forward_backward(torch.ones(4, 4))
        forward_backward.close()
        with pytest.raises(fxpipe.RunError) as error:
            forward_backward(torch.ones(4, 4))
        return str(error.value)

    assert all("closed" in text for text in run_strict(body, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fxpipe.compile(Two(), TWO).step_microbatches([]), "at least one micro-batch"),
        (lambda: fxpipe.compile(Pooled(), TWO, loss_fn=torch.dist)(1, 2), "the target is passed as target="),
        (lambda: fxpipe.compile(Two(), TWO, batch_dim={"y": None}), "batch_dim names 'y', which is no input"),
        (lambda: fxpipe.compile(by_hand(), TWO, loss_fn=torch.dist), "loss_fn= is for traced models"),
        (lambda: by_hand("a.b"), "'a.b' cannot name a stage"),
        (
            lambda: fxpipe.compile(Two(), TWO).load_state_dict({"c.weight": torch.ones(1)}),
            "the model has no 'c.weight'",
        ),
        (lambda: fxpipe.compile(Two(), TWO, microbatches=0), "at least 1 is needed"),
    ],
    ids=["no micro-batch", "target by position", "batch_dim", "loss_fn", "stage name", "state dict", "microbatches"],
)
def test_what_would_be_ignored_or_obscure_is_refused(make: Any, text: str) -> None:
    with pytest.raises(fxpipe.FxpipeError, match=text):
        make()


def by_hand(name: str = "a") -> fxpipe.StageGraph:
    return fxpipe.StageGraph.from_callables(
        {name: nn.Linear(4, 4), "b": lambda y: y.mean()}, [(name, "b")], {name: ["x"]}
    )


class SometimesTied(nn.Module):
    """One scale that three stages use, or fewer, as the inputs are given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> Tensor:
        h = fxpipe.stage_boundary(self.a(x) * self.scale)
        h = self.b(h)
        if second is not None:
            h = h * self.scale * second
        h = self.c(fxpipe.stage_boundary(h))
        return (h if third is None else h * self.scale * third).square().mean()


@pytest.mark.parametrize("later", [(False, False), (False, True), (True, False)])
def test_owners_of_a_parameter_that_a_batch_does_not_use_hear_of_its_gradient(later: tuple[bool, bool]) -> None:
    """All three hold a copy, and step it: each must have the gradient that plain PyTorch has."""
    one, x = torch.ones(4), torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def train(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for second, third in ((True, True), later):
            optimizer.zero_grad()
            step(x, one if second else None, one if third else None)
            optimizer.step()
        return next(p for name, p in model.named_parameters() if name == "scale").detach().clone()

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        topology = fxpipe.Topology([("pipe", 3)])
        compiled = fxpipe.compile(SometimesTied(), topology, microbatches=1, example_args=(x, one, one))
        return train(compiled, compiled.module, compiled.optimizer(torch.optim.SGD, lr=0.1))

    torch.manual_seed(0)
    model = SometimesTied()
    wanted = train(lambda *inputs: model(*inputs).backward(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    for scale in run_strict(body, 3):
        torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=1e-7)
