"""A repeated layer is traced once. The program is the same as if each layer were traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.graph.program import Program
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat.fakes import FakeTensorMode
from fxpipe.trace import Request, capture
from fxpipe.trace.export import tracer
from fxpipe.trace.export.repeats import Repeats

WIDTH = 8


class Layer(nn.Module):
    """A residual layer with dropout, and with casts that return their argument."""

    def __init__(self, number: int = 0, width: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.number = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH), number
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.5)
        self.scale = 1.0

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = self.norm(x.to(torch.float32)) + shift.to(torch.float32)
        up, gate = torch.relu(self.up(h)).chunk(2, dim=-1)
        hidden = torch.cat([up, gate * 0.5], dim=-1)[..., :: x.shape[-1] // WIDTH]
        return x + self.dropout(self.down(hidden)) * self.scale


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.start, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x, shift = self.start(x), torch.arange(WIDTH) * 0.1
        for layer in self.layers:
            x = layer(x, shift)
        return (x + shift).square().mean()


def of_layers(count: int) -> Model:
    return Model([Layer(number) for number in range(count)])


def captured(model: nn.Module, **options: object) -> Program:
    example = {"x": TensorSpec.from_tensor(torch.ones(3, WIDTH))}
    return capture(Request(model, ("x",), example=example, **options), "export")  # type: ignore[arg-type]


def facts(program: Program) -> list[object]:
    """All that a program says of its nodes."""
    return [
        (
            node.format_node(),
            [*(node.meta.get("nn_module_stack") or {}).values()],
            node.stack_trace,
            node.meta.get("modes"),
            str(node.meta.get("val")),
        )
        for node in program.graph.nodes
    ] + [sorted(program.constants), [value.tolist() for value in program.constants.values()]]


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], int]:
    """Compares a model's program with its program without repeats, and returns how many layers were not traced."""

    def compare(model: nn.Module, **options: object) -> int:
        made: list[Repeats | None] = []
        export = tracer._export_once
        with monkeypatch.context() as patch:
            patch.setattr(tracer, "_export_once", lambda *given: made.append([*given, None][2]) or export(*given))
            program = captured(model, **options)
        with monkeypatch.context() as patch:
            patch.setattr(Repeats, "watched", lambda repeats: contextlib.nullcontext())
            plain = captured(model, **options)
        assert facts(program) == facts(plain)
        return made[-1].followed if made[-1] else 0

    return compare


def test_the_second_and_later_layers_are_not_traced(followed: Callable[[nn.Module], int]) -> None:
    assert followed(of_layers(4)) == 3


def test_layers_are_cut_as_if_each_were_traced(followed: Callable[..., int]) -> None:
    assert followed(of_layers(4), cuts={"layers.1": "before", "layers.3": "both"}) == 2


def test_as_many_operators_run_for_eight_layers_as_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = FakeTensorMode.__torch_dispatch__

    def counted(mode: FakeTensorMode, func: object, *args: object, **kwargs: object) -> object:
        ran.append(str(func))
        return run(mode, func, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    counts = []
    for layers in (2, 4, 8):
        ran.clear()
        captured(of_layers(layers))
        counts.append(sum("relu" in name for name in ran))
    assert counts[0] == counts[1] == counts[2] > 0


def with_scale(layer: Layer, scale: float) -> Layer:
    layer.scale = scale
    return layer


def frozen(layer: Layer) -> Layer:
    layer.up.requires_grad_(False)
    return layer


def tied(layers: list[Layer]) -> list[Layer]:
    for layer in layers:
        layer.norm.weight = layer.down.bias = layers[0].down.bias
    return layers


def hooked(layer: Layer) -> Layer:
    layer.up.register_forward_hook(lambda module, args, output: output * 2)
    return layer


OTHERS = {
    "another width": ([Layer(), Layer(), Layer(width=32), Layer()], 2),
    "another attribute": ([Layer(), Layer(), with_scale(Layer(), 2.0), Layer()], 2),
    "a frozen weight": ([Layer(), Layer(), frozen(Layer()), frozen(Layer())], 2),
    "one of three has tied parameters": ([*tied([Layer(), Layer()]), Layer()], 1),
    "two kinds in turn": ([Layer(), with_scale(Layer(), 2.0), Layer(), with_scale(Layer(), 2.0)], 2),
    "a double weight": ([Layer(), Layer(), Layer().to(torch.float32), Layer().eval()], 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_is_traced(name: str, followed: Callable[[nn.Module], int]) -> None:
    layers, expected = OTHERS[name]
    assert followed(Model(list(layers))) == expected


def test_a_shared_layer_is_traced_once(followed: Callable[[nn.Module], int]) -> None:
    layer = Layer()
    assert followed(Model([layer, layer, Layer(), layer])) == 3


def test_a_hook_of_one_layer_is_followed(followed: Callable[[nn.Module], int]) -> None:
    followed(Model([Layer(), Layer(), hooked(Layer()), Layer()]))
    followed(Model([Layer(), hooked(Layer()), hooked(Layer()), Layer()]))


CALLS = [0]


class Counts(Layer):
    """Forward depends on the number of calls so far, which no attribute tells."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        CALLS[0] += 1
        return super().forward(x, shift) * (1 + CALLS[0] % 3)


class Counted(Model):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] = 0
        return super().forward(x)


class Keeps(Layer):
    """Another module uses a tensor that forward has made, and not returned."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        self.kept = self.up(x)
        return super().forward(x, shift)


class SumOfKept(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(layer.kept.sum() for layer in self.layers)


class Writes(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = super().forward(x, shift)
        h += 1
        return h


class WritesOutside(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        shift += 1
        return super().forward(x, shift)


class View(Layer):
    """Returns a view of its input."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift).relu_() if self.number > 9 else x.unsqueeze(0)[0]


class WithoutGradient(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x, shift)


class Casts(Layer):
    """A call returns a parameter itself, as a node."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        weight = self.up.weight.to(x.dtype).contiguous()
        return nn.functional.linear(x, weight) @ weight * self.scale + shift


class Sizes(Layer):
    """The size of a tensor is a torch.Size, and no tuple."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift) * x.size().numel()


class TwoResults(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, dict[str, Tensor | int]]:
        values, places = super().forward(x, shift).max(dim=-1, keepdim=True)
        return x * values, {"places": places, "count": 3, "x": x}


class OfPairs(Model):
    def forward(self, x: Tensor) -> Tensor:
        count = torch.zeros(())
        for layer in self.layers:
            x, more = layer(x, torch.ones(WIDTH))
            count = count + more["places"].sum() * more["count"] + more["x"].sum()
        return x.mean() + count


class PartlyWithoutGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number > 1):
                x = layer(x, torch.ones(WIDTH))
        return x.mean()


class PartlyUnderAutocast(Model):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=number > 1):
                x = layer(x.float(), torch.ones(WIDTH))
        return x.mean()


class Cache:
    """As transformers' caches: an object that all layers are given, with a tensor for each."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def updated(self, number: int, x: Tensor) -> Tensor:
        self.kept[number] = torch.cat([x, x])
        return self.kept[number]


class Caches(Layer):
    def forward(self, x: Tensor, shift: Tensor, cache: Cache | None = None) -> Tensor:
        assert cache is not None
        return super().forward(cache.updated(self.number, x)[: len(x)], shift)


class CountsCached(Caches):
    """Forward depends on the number of cached tensors."""

    def forward(self, x: Tensor, shift: Tensor, cache: Cache | None = None) -> Tensor:
        assert cache is not None
        return super().forward(x, shift, cache) * len(cache.kept)


class KeepsSome(Layer):
    """All layers use the tensor that a layer before, or the layer itself, has kept."""

    def forward(self, x: Tensor, shift: Tensor, cache: Cache | None = None) -> Tensor:
        assert cache is not None
        up = self.up(x)
        if self.number != 3:
            cache.kept[0] = up
        return x + self.down(cache.kept[0]) + shift


class WithCache(Model):
    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, torch.ones(WIDTH), cache)
        return x.mean()


class ReadsCache(Model):
    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, torch.ones(WIDTH), cache)
        return x.mean() + sum(kept.sum() for kept in cache.kept.values())


class CacheEach(Model):
    """Each layer is given another object: what functions of torch do with it may differ."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, torch.ones(WIDTH), Cache())
        return x.mean()


MODELS: dict[str, tuple[Callable[[list[nn.Module]], nn.Module], type[Layer], int]] = {
    "a count of calls": (Counted, Counts, 0),
    "a tensor is kept": (Model, Keeps, 3),
    "a kept tensor is used": (SumOfKept, Keeps, 0),
    "writes in place": (Model, Writes, 3),
    "writes into its input": (Model, WritesOutside, 0),
    "a view": (Model, View, 0),
    "changes modes": (Model, WithoutGradient, 0),
    "a weight is cast": (Model, Casts, 3),
    "a size": (Model, Sizes, 3),
    "several results": (OfPairs, TwoResults, 2),
    "a cache": (WithCache, Caches, 2),
    "a cache that is counted": (WithCache, CountsCached, 0),
    "a tensor of another layer like it": (WithCache, KeepsSome, 0),
    "a cache that is read": (ReadsCache, Caches, 0),
    "a cache for each": (CacheEach, Caches, 0),
    "called in two grad modes": (PartlyWithoutGradient, Layer, 1),
    "called under autocast": (PartlyUnderAutocast, Layer, 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_as_if_each_layer_were_traced(name: str, followed: Callable[[nn.Module], int]) -> None:
    model, layer, expected = MODELS[name]
    count = followed(model([layer(number) for number in range(4)]))
    assert not expected or count == expected


class Halves(Layer):
    """Makes a constant."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift) * torch.tensor([0.5, 2.0] * (WIDTH // 2))


def test_a_step_of_a_model_with_repeats_equals_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = Model([Halves() for _ in range(4)]).eval()
    x = torch.randn(6, WIDTH)
    plain = torch.stack([model(rows) for rows in x.split(3)]).mean()
    plain.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    step = fxpipe.compile(
        model,
        fxpipe.Topology([("pipe", 2)]),
        microbatches=2,
        tracer="export",
        boundaries=["layers.2"],
        example_args=(x,),
    )
    assert torch.equal(step(x).detach(), plain.detach())
    assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))
