"""Models that other people wrote and that a capture once refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import TraceError
from tests.harness import accumulate, assert_same, cut, engine_of, gradients_of
from tests.layered import TRACERS, Layer, Layers, assert_trains, compiled, vectors
from tests.models import Inputs
from tests.pool import Pool
from tests.thinned import ALL, every, in_turn

every_tracer = pytest.mark.parametrize("tracer", TRACERS)


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


class VmappedLayer(Layers):
    def run(self, x: Tensor) -> Tensor:
        return self.layers(torch.vmap(lambda row: self.layers[0](row).tanh())(x))  # type: ignore[no-any-return]


def test_vmap_over_what_is_trained_is_refused_between_submodules() -> None:
    with pytest.raises(TraceError, match=r"torch\.vmap on tensors that need a gradient"):
        compiled(VmappedLayer(), vectors(0), ["layers.1"], tracer="record")


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


@every_tracer
def test_a_cut_in_what_a_batch_lacks_is_left_out_for_it(tracer: str) -> None:
    batches = [with_images(0), vectors(1), with_images(2), vectors(3)]
    assert_trains(MaybeImage, batches, IMAGE_CUTS, 4, tracer=tracer, ranks=1)


def image_losses(engine: str) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    torch.manual_seed(0)
    forward_backward = compiled(MaybeImage(), with_images(0), IMAGE_CUTS)
    found = []
    for batch in (with_images(1), vectors(2) | {"image": None}):
        forward_backward.zero_grad()
        found.append((forward_backward(**batch), gradients_of(forward_backward.named_parameters())))
    return found


def test_it_is_so_on_two_processes(pool: Pool) -> None:
    torch.manual_seed(0)
    plain = MaybeImage()
    for step, batch in enumerate((with_images(1), vectors(2))):
        plain.zero_grad()
        wanted_loss, _ = accumulate(lambda _, part: plain(**part), cut(batch, 2))
        wanted = gradients_of(plain.named_parameters())
        for run in engine_of("distributed", lambda: pool)(2, image_losses, ""):
            loss, gradients = run[step]
            assert_same(loss, wanted_loss, "loss")
            for name, gradient in gradients.items():
                assert_same(gradient, wanted[name], name)


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

    def without_images(number: int) -> Inputs:
        batch: Inputs = hf.causal(8, seeded(number))
        return batch | {"token_type_ids": torch.zeros_like(batch["input_ids"])}

    def idefics(config: Any, model: Any) -> Callable[[], nn.Module]:
        words = {**hf.DECODER, **hf.SPECIAL, "num_hidden_layers": 4, "model_type": "llama"}
        images = {**hf.IMAGES, "num_hidden_layers": 2}
        made = config(
            text_config=words, vision_config=images, image_token_id=hf.IMAGE_TOKEN, scale_factor=2, pad_token_id=0
        )
        return lambda: model(made)

    def one_token_an_image(number: int) -> Inputs:
        batch: Inputs = hf.images_in_text(8, seeded(number))
        places = hf.PATCHES - 1  # four patches make a token
        texts = {name: value[:, places:] for name, value in batch.items() if name != "pixel_values"}
        return texts | {"pixel_values": batch["pixel_values"][:, None]}

    cuts, texts = hf.layers("model.language_model.layers", 1, 2), hf.layers("model.text_model.layers", 1, 2)
    idefics3 = idefics(transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration)
    smolvlm = idefics(transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration)
    return {
        "Gemma 3, images": (gemma3, with_kinds, cuts),
        "Gemma 3, text": (gemma3, without_images, cuts),
        "Idefics 3": (idefics3, one_token_an_image, texts),
        "SmolVLM": (smolvlm, one_token_an_image, texts),
    }


@pytest.mark.parametrize("name", every(2, ["Gemma 3, images", "Gemma 3, text", "Idefics 3", "SmolVLM"]))
def test_models_of_hugging_face_that_were_refused(name: str) -> None:
    model, batch, cuts = hugging_face()[name]
    tracer = "auto" if ALL else "record"  # which auto comes to, some seconds of torch.export later
    assert_trains_counted(model, [batch(0), batch(1)], cuts, tracer)


def assert_trains_counted(
    make: Callable[[], nn.Module], batches: Sequence[Inputs], cuts: Any, tracer: str = "auto"
) -> None:
    """As ``assert_trains``, where one micro-batch holds the batch: its loss is the mean over its own labels."""
    torch.manual_seed(0)
    model = make().train()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"boundaries": cuts, "microbatches": 1, "example_kwargs": batches[0], "tracer": tracer}
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 1)]), **options)
    assert len(forward_backward.stages) == 3
    for batch in batches[1:]:
        (wanted := plain(**batch).loss).backward()
        assert_same(forward_backward(**batch), wanted.detach(), "loss", 1e-6)
    expected = gradients_of(plain.named_parameters())
    for name, gradient in gradients_of(forward_backward.named_parameters()).items():
        if name in expected:
            assert_same(gradient, expected[name], name, 1e-6)
