"""A stage's forward and backward, called and printed on their own."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxpipe
from fxpipe.stage.stage_calls import check_shapes


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        v = fxpipe.stage_boundary(self.image(image).tanh(), name="loss")
        t = fxpipe.stage_boundary(self.text(text))
        return (v * t * self.scale.exp()).mean()


Compiled = tuple[Towers, fxpipe.ForwardBackward]


@pytest.fixture
def towers() -> Compiled:
    torch.manual_seed(0)
    model = Towers()
    return model, fxpipe.compile(model, fxpipe.Topology([("pipe", 3)]), microbatches=2)


def test_stages_called_by_hand_give_plain_pytorchs_loss_and_gradients(
    towers: Compiled,
) -> None:
    model, forward_backward = towers
    image, text = torch.randn(5, 6), torch.randn(5, 3)
    model(image, text).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    expected_loss = model(image, text).detach()
    model.zero_grad()

    stages = forward_backward.stages
    (v,), saved_image = stages["image"].forward(image)
    (t,), saved_text = stages["text"].forward(text)
    (loss,), saved_loss = stages["loss"].forward(v, t)
    d_v, d_t = stages["loss"].backward(saved_loss, [True])
    assert stages["image"].backward(saved_image, [d_v]) == [None]
    assert stages["text"].backward(saved_text, [d_t]) == [None]

    assert torch.equal(loss, expected_loss)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_a_gradient_that_did_not_come_back_is_none_and_a_missing_input_is_named(
    towers: Compiled,
) -> None:
    model, forward_backward = towers
    _, saved = forward_backward.stages["image"].forward(torch.randn(5, 6))
    assert forward_backward.stages["image"].backward(saved, [None]) == [None]
    assert model.image.weight.grad is None
    with pytest.raises(TypeError, match=r"stage loss takes 2 inputs .* 1 were given"):
        forward_backward.stages["loss"].forward(torch.zeros(1))


def test_forward_prints_its_code_and_backward_what_it_returns(
    towers: Compiled,
) -> None:
    stages = towers[1].stages
    forward, backward = str(stages["image"].forward), str(stages["image"].backward)
    assert forward.startswith("# forward of stage image: (image) -> (tanh)")
    assert "def forward(self, image)" in forward
    assert "self.image(image)" in forward
    assert "torch.autograd.backward([tanh], [d_tanh])" in backward
    assert "return [d_image]" in backward


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.shift = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (fxpipe.stage_boundary(self.one(x)) + self.shift).sum()


def test_a_value_that_autograd_did_not_save_is_free_once_it_has_been_sent_or_used() -> None:
    stages = fxpipe.compile(Shifting(), fxpipe.Topology([("pipe", 2)])).stages
    outputs, saved = stages[0].forward(torch.randn(2, 4))
    sent = weakref.ref(outputs[0])
    assert saved.roots[0][0] is not None
    del outputs
    gc.collect()
    assert sent() is None
    x = torch.randn(2, 4, requires_grad=True)
    tensor, memory = weakref.ref(x), StorageWeakRef(x.untyped_storage())
    _, saved = stages[1].forward(x)
    del x
    assert tensor() is None
    assert memory.expired()
    (gradient,) = stages[1].backward(saved, [True])
    assert gradient.tolist() == [[1.0] * 4] * 2


def test_the_stage_table_shows_parameters_bytes_and_destinations(
    towers: Compiled,
) -> None:
    _, forward_backward = towers
    before = str(forward_backward.stages)
    assert "after 1st step" in before
    forward_backward(torch.randn(4, 6), torch.randn(4, 3))
    rows = {line.split()[0]: line.split() for line in str(forward_backward.stages).splitlines()[2:]}
    sent = 2 * 4 * 4  # rows of a micro-batch × width × bytes of a float32
    assert rows["image"][1:5] == ["0", str(6 * 4 + 4), "0", str(sent)]
    assert rows["text"][1:5] == ["1", str(3 * 4 + 4), "0", str(sent)]
    assert rows["loss"][1:5] == ["2", "1", str(2 * sent), "0"]
    assert rows["image"][-2:] == ["→", "loss"]


class Unnamed(nn.Module):
    """A submodule, an attribute of what it returns, and code of the model's own on both sides of a boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = fxpipe.stage_boundary(self.first(x))
        x = fxpipe.stage_boundary(self.inner(x).T)
        x = fxpipe.stage_boundary(x * 2)
        return x.square().mean()


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_the_stage_table_says_what_a_value_is_and_where_a_stage_without_a_module_begins(tracer: str) -> None:
    x = torch.randn(4, 4)
    stages = fxpipe.compile(Unnamed(), fxpipe.Topology([("pipe", 1)]), tracer=tracer, example_args=(x,)).stages
    text = str(stages)
    if tracer == "symbolic":
        assert "  first → inner" in text
        assert "  .T → stage2" in text
    else:
        assert "  linear of first → inner" in text
    assert "  mul → stage3" in text
    assert "stage2 begins with mul (" in text
    assert "x = fxpipe.stage_boundary(x * 2))" in text
    assert "inner begins" not in text


def test_hooks_that_are_put_on_a_stages_own_module_later_are_called(
    towers: Compiled,
) -> None:
    _, forward_backward = towers
    batch = torch.randn(4, 6), torch.randn(4, 3)
    forward_backward(*batch)
    module, seen = forward_backward.stages["image"].module, list[str]()
    assert isinstance(module, nn.Module)
    hook = module.register_forward_hook(lambda *_: seen.append("own"))
    forward_backward(*batch)
    hook.remove()
    forward_backward(*batch)
    assert seen == ["own"] * 2  # of two micro-batches
    everywhere = nn.modules.module.register_module_forward_pre_hook(
        lambda called, _: seen.append("all") if called is module else None
    )
    forward_backward(*batch)
    everywhere.remove()
    assert seen == ["own"] * 2 + ["all"] * 2


def test_a_part_that_is_put_in_place_of_a_stages_own_is_called(
    towers: Compiled,
) -> None:
    _, forward_backward = towers
    stage = forward_backward.stages["image"]
    stage.module.image = nn.Linear(6, 4)  # type: ignore[union-attr]
    x = torch.randn(5, 6)
    assert torch.equal(stage.forward(x)[0][0], stage.module.image(x).tanh())  # type: ignore[union-attr]


def test_a_written_input_is_refused_as_before_where_it_needs_a_gradient() -> None:
    entered: list[Tensor] = []

    def write(x: Tensor) -> Tensor:
        entered.append(x)
        return x.mul_(2).sum()

    graph = fxpipe.StageGraph.from_callables(
        {"start": nn.Linear(2, 2), "end": write}, [("start", "end")], {"start": ["x"]}
    )
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        graph["end"].forward(torch.ones(1, 2, requires_grad=True))
    assert entered[0].grad_fn is not None


@pytest.mark.parametrize("whole", ["", "part"])
def test_other_shapes_than_were_captured_are_refused_and_the_same_are_not(whole: str) -> None:
    check_shapes({"h": [torch.ones(2)]}, {"h": [(2,)]}, "part", False, whole)
    with pytest.raises(fxpipe.RunError, match="an opaque region, returned" if whole else "part returned"):
        check_shapes({"h": [torch.ones(3)]}, {"h": [(2,)]}, "part", False, whole)
