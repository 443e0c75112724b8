"""Models that other people wrote and that a capture once refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxpipe
from fxpipe import RunError, TraceError, stage_boundary
from tests.harness import Steps, assert_gradients, assert_same, assert_steps, cut, gradients_of, steps_of
from tests.layered import TRACERS, WIDTH, Layer, Layers, assert_trains, compiled, vectors
from tests.models import Inputs
from tests.pool import Pool
from tests.thinned import ALL, in_turn


class Vmapped(Layers):
    """Attention with a mask that is made of positions, one pair of them at a time; ``allowed`` indexes with tensors."""

    def run(self, x: Tensor) -> Tensor:
        groups = (x.detach().sum(-1) > 0).long().cumsum(0)

        def allowed(row: Tensor, column: Tensor) -> Tensor:
            return (row >= column) & (groups.index_select(0, row.view(1)) <= 3).squeeze(0)

        places = torch.arange(x.shape[0])
        mask = torch.vmap(torch.vmap(allowed, (None, 0)), (0, None))(places, places)
        for layer in self.layers:
            x = layer(torch.where(mask, x @ x.T, 0.0).softmax(-1) @ x)
        return x


def test_a_mask_made_by_vmap_is_recorded() -> None:
    batches = [vectors(n, 12) for n in (0, 1, 2)]
    assert_trains(Vmapped, batches, ["layers.1", "layers.3"], 3, tracer="record")


class Branches(nn.Module):
    """As HRNet's modules: puts what it computes into the list that it is given, and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        for place, branch in enumerate(self.branches):
            x[place] = branch(x[place])
        return [x[0] + x[1], x[1] - x[0]]


class HighResolution(nn.Module):
    """``reads``: whether the list is read again, as eager PyTorch then has it."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Branches() for _ in range(3))
        self.reads = reads

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = [x, x * 2]
        for stage in self.stages:
            made = stage(values)
            values = [made[0] + values[0], made[1]] if self.reads else made
        return F.mse_loss(values[0] + values[1], y)


@pytest.mark.parametrize(("tracer", "reads"), in_turn(TRACERS, [True, False]))
def test_a_list_that_a_submodule_changes_is_its_callers(reads: bool, tracer: str) -> None:
    cuts = ["stages.1", "stages.2"]
    assert_trains(lambda: HighResolution(reads), [vectors(0), vectors(1)], cuts, tracer=tracer)


class MaybeImage(nn.Module):
    """image → image tower ∥ text → layers, which meet; without an image the text goes on alone."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer(), Layer())
        self.join = Layer()

    def forward(self, x: Tensor, y: Tensor, image: Tensor | None = None) -> Tensor:
        t = self.text(x)
        if image is not None:
            t = t + self.image(image)
        return F.mse_loss(self.join(t), y)


IMAGE_CUTS = {"image.1": "before", "text.1": "before", "join": "before"}


def with_images(number: int) -> Inputs:
    return vectors(number) | {"image": vectors(number + 100)["x"]}


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_cut_in_what_a_batch_lacks_is_left_out_for_it(tracer: str) -> None:
    batches = [with_images(0), vectors(1), with_images(2), vectors(3)]
    assert_trains(MaybeImage, batches, IMAGE_CUTS, 4, tracer=tracer, ranks=1)


def test_a_cut_in_what_the_example_lacks_is_refused_with_what_to_give() -> None:
    told = r"names image\.1, which MaybeImage\.forward never calls with these inputs.*give an example batch"
    with pytest.raises(TraceError, match=told):
        compiled(MaybeImage(), vectors(0), IMAGE_CUTS)


class Late(Layers):
    """symbolic and export stop at the first layer, record at the last."""

    def run(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        x = self.layers[1](x)
        return self.layers[3](self.layers[2](x)) * x.sum().item()  # type: ignore[no-any-return]


def test_the_error_leads_with_the_tracer_that_got_furthest() -> None:
    with pytest.raises(TraceError) as caught:
        compiled(Late(), vectors(0), ["layers.1"])
    first, file, code, *others = str(caught.value).splitlines()
    assert first.startswith("record: forward looks at the values of a tensor (item)")
    assert "test_once_refused.py" in file
    assert "x.sum().item()" in code
    assert [line.partition(":")[0] for line in others] == ["export", "symbolic"]
    assert all("activation checkpointing" in line and "test_once_refused.py:" in line for line in others)
    assert all(line.endswith("; tracer='record' keeps it") for line in others)


class Taken(Layers):
    """torch.export, which gets furthest, has no word on what to write instead."""

    def run(self, x: Tensor) -> Tensor:
        return self.layers(x) * (2.0 if x.detach().numpy().sum() > 0 else 1.0)  # type: ignore[no-any-return]


def test_a_tracer_that_does_not_say_what_to_write_comes_last() -> None:
    with pytest.raises(TraceError) as caught:
        compiled(Taken(), vectors(0), ["layers.1"])
    lines = [line for line in str(caught.value).splitlines() if not line.startswith("  ")]
    assert [line.partition(":")[0] for line in lines] == ["record", "symbolic", "export"]
    assert ["; " in line for line in lines] == [True, True, False]


def hugging_face() -> Mapping[str, Any]:
    """name → (model, batch of a number, boundaries)"""
    hf = pytest.importorskip("tests.hf")
    import transformers

    def seeded(number: int) -> torch.Generator:
        return torch.Generator().manual_seed(number)

    def gemma3() -> nn.Module:
        kinds = ["sliding_attention", "full_attention"] * 2
        words = {**hf.DECODER, "head_dim": 4, "num_hidden_layers": 4, "sliding_window": 4, "layer_types": kinds}
        config = transformers.Gemma3Config(
            text_config=words,
            vision_config={**hf.IMAGES, "num_hidden_layers": 2},
            mm_tokens_per_image=4,
            image_token_index=hf.IMAGE_TOKEN,
            boi_token_index=44,
            eoi_token_index=43,
        )
        return transformers.Gemma3ForConditionalGeneration(config)

    def with_kinds(number: int) -> Inputs:
        batch: Inputs = hf.images_in_text(8, seeded(number))
        return batch | {"token_type_ids": (batch["input_ids"] == hf.IMAGE_TOKEN).long()}

    def idefics3() -> nn.Module:
        words = {**hf.DECODER, **hf.SPECIAL, "num_hidden_layers": 4, "model_type": "llama"}
        config = transformers.Idefics3Config(
            text_config=words,
            vision_config={**hf.IMAGES, "num_hidden_layers": 2},
            image_token_id=hf.IMAGE_TOKEN,
            scale_factor=2,
            pad_token_id=0,
        )
        return transformers.Idefics3ForConditionalGeneration(config)

    def one_token_an_image(number: int) -> Inputs:
        batch: Inputs = hf.images_in_text(8, seeded(number))
        places = hf.PATCHES - 1  # four patches make a token
        texts = {name: value[:, places:] for name, value in batch.items() if name != "pixel_values"}
        return texts | {"pixel_values": batch["pixel_values"][:, None]}

    cuts, texts = hf.layers("model.language_model.layers", 1, 2), hf.layers("model.text_model.layers", 1, 2)
    return {
        "Gemma 3": (gemma3, with_kinds, cuts),
        "Idefics 3": (idefics3, one_token_an_image, texts),
    }


@pytest.mark.parametrize("name", ["Gemma 3", "Idefics 3"])
def test_models_of_hugging_face_that_were_refused(name: str) -> None:
    model, batch, cuts = hugging_face()[name]
    # of Gemma 3 auto comes to record, some seconds of torch.export later; Idefics 3 has an opaque method
    tracer = "record" if name == "Gemma 3" and not ALL else "auto"
    torch.manual_seed(0)
    compiled_model = model().train()
    plain = copy.deepcopy(compiled_model)
    options: dict[str, Any] = {"boundaries": cuts, "microbatches": 1, "example_kwargs": batch(0), "tracer": tracer}
    forward_backward = fxpipe.compile(compiled_model, fxpipe.Topology([("pipe", 1)]), **options)
    assert len(forward_backward.stages) == 3
    (wanted := plain(**batch(1)).loss).backward()  # one micro-batch: the mean over its own labels
    assert_same(forward_backward(**batch(1)), wanted.detach(), "loss", 1e-6)
    assert_gradients(gradients_of(forward_backward.named_parameters()), plain, 1e-6)


# --- cuts beside, around and amid what the model itself checkpoints ---


class Checkpointed(Layers):
    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedClosures(Layers):
    def run(self, x: Tensor) -> Tensor:
        def called(layer: nn.Module) -> Callable[..., Any]:
            return lambda *args: layer(*args)

        for layer in self.layers:
            x = checkpoint(called(layer), x, use_reentrant=False)
        return x


class CheckpointedPairs(Layers):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "cuts", "stages"),
    [
        (Checkpointed, {"layers.1": "before", "layers.3": "before"}, 3),
        (CheckpointedReentrant, {"layers.1": "both"}, 3),
        (CheckpointedClosures, {"layers.1": "before", "layers.2": "after"}, 3),
        (CheckpointedPairs, {"layers.2": "before"}, 2),
        (CheckpointedPairs, "auto", None),
    ],
)
def test_a_cut_beside_a_checkpointed_submodule_lies_outside_of_the_checkpoint(
    make: Any, cuts: Any, stages: int | None
) -> None:
    forward_backward = assert_trains(make, [vectors(0), vectors(1)], cuts, stages)
    assert "record" in str(forward_backward.stages)
    assert any("checkpoint_" in str(stage.forward) for stage in forward_backward.stages)


def steps() -> Steps:
    torch.manual_seed(0)
    return steps_of(compiled(Checkpointed(), vectors(0), ["layers.2"]), [vectors(1)])


def test_it_does_so_on_two_processes(pool: Pool) -> None:
    torch.manual_seed(0)
    assert_steps(pool.run(steps, ranks=2), Checkpointed(), [vectors(1)], 2)


def test_a_cut_amid_a_checkpointed_function_is_refused_and_auto_is_named() -> None:
    with pytest.raises(TraceError, match=r'\(layers\.1\) lies amid a function.*boundaries="auto"'):
        compiled(CheckpointedPairs(), vectors(0), ["layers.1"])


# --- code that looks at values: branches that are certain, methods that are opaque, assertions ---


class LayerDrop(Layers):
    """As speech models skip layers."""

    def __init__(self, skips: Callable[[], Any]) -> None:
        super().__init__()
        self.skips = skips

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.skips():
                x = layer(x)
        return x


def test_a_branch_on_a_drawn_number_that_is_certain_is_decided() -> None:
    skips = lambda: torch.rand([]) < 0.0  # noqa: E731
    assert_trains(lambda: LayerDrop(skips), [vectors(0), vectors(1)], ["layers.1", "layers.3"], 3)


@pytest.mark.parametrize(
    "skips",
    [lambda: torch.rand([]) < 0.1, lambda: torch.rand([]) <= 0, lambda: torch.rand([]).view(1).sub_(1) < 0],
    ids=["rand < 0.1", "rand <= 0", "written"],
)
def test_one_that_is_not_is_refused(skips: Callable[[], Any]) -> None:
    with pytest.raises(TraceError, match="looks at the values of a tensor"):
        compiled(LayerDrop(skips), vectors(0), ["layers.1"])


class Asserting(Layers):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._assert((x < 1e6).all(), "too large")
            x = layer(x)
        return x


def test_assertions_on_values_between_submodules_are_in_nobodys_way() -> None:
    assert_trains(Asserting, [vectors(0), vectors(1)], ["layers.1", "layers.3"], 3, tracer="record")


class Predicts(Layers):
    """As transformers' InformerForPrediction: the loss is a negative log-likelihood, and torch checks its arguments."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.run(x)
        return -torch.distributions.StudentT(3.0, h, 1 + h.square()).log_prob(y).mean()


def test_a_distributions_checks_are_in_nobodys_way() -> None:
    assert_trains(Predicts, [vectors(0), vectors(1)], ["layers.1", "layers.3"], 3, tracer="record")


class Sees(nn.Module):
    """As Idefics 3: pictures that are nothing but padding are dropped, and the others take the places of some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = Layer(), nn.Sequential(Layer(), Layer(), Layer())
        self.seen = 0

    def features(self, pictures: Tensor, scale: float) -> dict[str, Any]:
        self.seen = self.seen + 1
        kept = pictures[(pictures != 0).any(-1)]
        return {"all": [self.vision(kept) * scale]}

    def forward(self, x: Tensor, y: Tensor, pictures: Tensor) -> Tensor:
        found = torch.cat(self.features(pictures, scale=0.5)["all"])
        x = x.masked_scatter((pictures != 0).any(-1, keepdim=True), found)
        return F.mse_loss(self.text(x), y)


def with_pictures(number: int) -> Inputs:
    """Every second picture of batches with odd numbers is padding."""
    pictures = vectors(number + 50)["x"]
    pictures[1 :: 2 if number % 2 else 8] = 0.0
    if number % 2 == 0:
        pictures[1] = 1.0
    return vectors(number) | {"pictures": pictures}


def test_a_method_that_looks_at_values_stays_whole_where_cuts_are_elsewhere() -> None:
    batches, cuts = [with_pictures(0), with_pictures(2)], ["text.1", "text.2"]
    forward_backward = assert_trains(Sees, batches, cuts, 3)
    assert "features is opaque" in str(forward_backward.stages)
    homes = [any("vision" in name for name in stage.tensors) for stage in forward_backward.stages]
    assert homes == [True, False, False]


def test_under_record_the_rule_for_such_a_method_is_named() -> None:
    with pytest.raises(TraceError, match=r'looks at the values(.|\n)*\{"features": "whole"\}'):
        compiled(Sees(), with_pictures(0), ["text.1"], tracer="record")


def test_a_method_whose_submodule_is_cut_is_refused() -> None:
    with pytest.raises(TraceError, match="looks at the values of a tensor"):
        compiled(Sees(), with_pictures(0), ["text.1", "vision"], tracer="record")


class Patched(nn.Module):
    """As torchvision's ViT: each block asserts the dimensions of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        _, width = x.shape
        torch._assert(width == WIDTH, f"Wrong width! Expected {WIDTH} but got {width}!")
        x = self.first(x)
        for layer in self.layers:
            x = stage_boundary(x)
            torch._assert(x.dim() == 2, f"Expected (rows, width), got {x.shape}")
            torch._assert((x.abs() * 2 < 1e6).all(), "too large")
            x = layer(x)
        return F.mse_loss(x, y)


def test_an_assertion_runs_in_its_operands_stage_makes_none_of_its_own_and_is_raised() -> None:
    forward_backward = assert_trains(Patched, [vectors(0), vectors(1)], (), 5, tracer="symbolic", ranks=1)
    found = [str(stage.forward).count("torch._assert(") for stage in forward_backward.stages]
    assert found == [2] * 4 + [0]
    with pytest.raises(AssertionError, match="too large"):
        forward_backward(**{name: value * 1e7 for name, value in vectors(1).items()})


# --- forwards of ``*args`` and ``**kwargs``: how inputs get their names ---


class LowRank(nn.Module):
    """As PEFT's layers: the layer that was there, and a product of two thin matrices beside it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        for adapter in self.lora_A:
            result = result + self.lora_B[adapter](self.lora_A[adapter](x)) * 2.0
        return result  # type: ignore[no-any-return]


class Tuner(nn.Module):
    """As PEFT's LoraModel, which calls the model's forward itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class Adapted(nn.Module):
    """As PeftModel."""

    def __init__(self) -> None:
        super().__init__()
        model = Layers()
        for layer in model.layers:
            layer.linear = LowRank(layer.linear)
        self.base_model = Tuner(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name != "adapter_names"}
        return self.base_model.model(*args, **kept)


class AdaptedByName(Adapted):
    """As PeftModelForCausalLM: some inputs by name, the rest passed on."""

    def forward(self, x: Any = None, mask: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        return self.base_model(x=x, **kwargs)


@pytest.mark.parametrize(("tracer", "make"), in_turn(TRACERS, [Adapted, AdaptedByName]))
def test_a_forward_of_args_and_kwargs_takes_its_inputs_by_name(make: Any, tracer: str) -> None:
    cuts = ["base_model.model.layers.1", "base_model.model.layers.3"]
    forward_backward = assert_trains(make, [vectors(0), vectors(1), vectors(2)], cuts, stages=3, tracer=tracer)
    assert set(forward_backward.required_inputs) == {"x", "y"}


def test_what_is_given_by_place_to_a_forward_of_args_is_refused_with_what_to_write() -> None:
    batch = vectors(0)
    forward_backward = compiled(Adapted(), batch, ["base_model.model.layers.1"])
    with pytest.raises(RunError, match=r"takes \*args, and 1 inputs were given by place.*pass every input by its name"):
        forward_backward(batch["x"], y=batch["y"])


def test_an_adapted_model_of_hugging_face_is_given_the_number_of_its_labels() -> None:
    hf = pytest.importorskip("tests.hf")

    class Peft(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.base_model = Tuner(model)

        def get_base_model(self) -> nn.Module:
            return self.base_model.model

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.base_model.model, name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.get_base_model()(*args, **kwargs)

    torch.manual_seed(0)
    model = Peft(hf.llama())
    plain, batches = copy.deepcopy(model), [hf.causal(8, torch.Generator().manual_seed(n)) for n in (0, 1)]
    forward_backward = compiled(model, batches[0], ["base_model.model.model.layers.2"])
    loss = forward_backward(**batches[1])
    items = (batches[1]["labels"][:, 1:] != -100).sum()
    parts = [plain(**part, num_items_in_batch=items).loss for part in cut(batches[1], 2)]
    assert_same(loss, sum(parts[1:], start=parts[0]).detach(), "loss")
