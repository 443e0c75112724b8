"""Hugging Face models as they come: tiny, with random weights, each a ``HFCase`` of the table ``MODELS``.

Nothing is downloaded and no model is changed: boundaries are names of submodules. Texts are padded to the right, masks
and labels tell where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fxpipe.batch.description import describe
from fxpipe.trace import Request
from fxpipe.trace.cuts.cuts_by_name import Boundaries, resolve
from tests.harness import Run, accumulate, cut, gradients_of, rows_of
from tests.models import Case, Inputs

transformers.logging.set_verbosity_error()  # for its advice on token numbers beyond these vocabularies

WORDS, LENGTH = 48, 9
PATCHES = 4
"""Of an image of 8 × 8 numbers."""
IMAGE_TOKEN, VIDEO_TOKEN = WORDS - 1, WORDS - 2
ROUTER = 0.1
"""The factor of a mixture's auxiliary loss."""
NONE_LEFT = -100
"""A label that no loss counts."""
WIDTH: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
DECODER = {**WIDTH, "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 32}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGES = {**WIDTH, "image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class HFCase(Case):
    """A Hugging Face model and where it is cut.

    ``items``: which labels are counted for ``num_items_in_batch``, as transformers' Trainer counts them; None: the
    loss is its micro-batch's mean, whatever the model is given. ``auxiliary``: the factor of its ``aux_loss``.
    """

    rows: int = 8
    boundaries: Boundaries = ()
    items: Callable[[Tensor], Tensor] | None = None
    auxiliary: float = 0.0

    def labels_of(self, batch: Inputs) -> Tensor | None:
        """The value of ``num_items_in_batch`` for that batch."""
        return None if self.items is None else (self.items(batch["labels"]) != NONE_LEFT).sum()


def every_label(labels: Tensor) -> Tensor:
    return labels


def predicted_labels(labels: Tensor) -> Tensor:
    """A causal model predicts every label but a row's first."""
    return labels[:, 1:]


# --- batches ---


def mask_of(rows: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    """1 where there is a word; the first row is full, each has three words at least."""
    words = torch.randint(3, length + 1, (rows, 1), generator=generator)
    words[0] = length
    return (torch.arange(length) < words).long()


def text(rows: int, generator: torch.Generator, length: int = LENGTH) -> Inputs:
    """Words and their mask, as CLIP reads them: each row ends with its end token."""
    mask = mask_of(rows, generator, length)
    ids = torch.randint(3, IMAGE_TOKEN - 2, (rows, length), generator=generator)
    last = mask.sum(1) - 1
    ids[torch.arange(rows), last] = SPECIAL["eos_token_id"]
    return {"input_ids": ids * mask, "attention_mask": mask}


def causal(rows: int, generator: torch.Generator) -> Inputs:
    """Words are their own labels."""
    batch = text(rows, generator)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, NONE_LEFT)}


def masked_words(rows: int, generator: torch.Generator) -> Inputs:
    """A third of the words are labels; one of each row at least."""
    batch = text(rows, generator)
    hidden = (torch.rand(rows, LENGTH, generator=generator) < 0.3) & (batch["attention_mask"] == 1)
    hidden[:, 0] = True
    return batch | {"labels": batch["input_ids"].masked_fill(~hidden, NONE_LEFT)}


def pixels(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=generator)


def pairs(rows: int, generator: torch.Generator) -> Inputs:
    """Images and their captions."""
    return text(rows, generator) | {"pixel_values": pixels(rows, generator), "return_loss": True}


def classes(rows: int, generator: torch.Generator) -> Inputs:
    return {"pixel_values": pixels(rows, generator), "labels": torch.randint(0, 5, (rows,), generator=generator)}


def translated(rows: int, generator: torch.Generator) -> Inputs:
    target = text(rows, generator, LENGTH - 2)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, NONE_LEFT)
    return text(rows, generator) | {"labels": labels}


def transcribed(rows: int, generator: torch.Generator) -> Inputs:
    sound = torch.randn(rows, 8, 24, generator=generator)
    return {"input_features": sound, "labels": translated(rows, generator)["labels"]}


def images_in_text(rows: int, generator: torch.Generator) -> Inputs:
    """A picture ahead of each text, one token for each of its patches."""
    words = causal(rows, generator)
    ids = torch.full((rows, PATCHES), IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([ids, words["input_ids"]], 1),
        "pixel_values": pixels(rows, generator),
        "attention_mask": torch.cat([torch.ones_like(ids), words["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(ids, NONE_LEFT), words["labels"]], 1),
    }


def patches_in_text(rows: int, generator: torch.Generator) -> Inputs:
    """The same for Qwen2-VL: an image is rows of patches, and a grid says how many; four patches make a token."""
    words = causal(rows, generator)
    ids = torch.full((rows, 1), IMAGE_TOKEN)
    input_ids = torch.cat([ids, words["input_ids"]], 1)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.cat([torch.ones_like(ids), words["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(ids, NONE_LEFT), words["labels"]], 1),
        "pixel_values": torch.randn(4 * rows, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]]).repeat(rows, 1),
        "mm_token_type_ids": (input_ids == IMAGE_TOKEN).int(),
    }


# --- models ---


def clip() -> nn.Module:
    towers = {"text_config": {**WIDTH, **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": LENGTH}}
    towers["text_config"]["num_hidden_layers"] = 2
    config = transformers.CLIPConfig(**towers, vision_config={**IMAGES, "num_hidden_layers": 3}, projection_dim=16)
    return transformers.CLIPModel(config)


def siglip() -> nn.Module:
    words = {**WIDTH, **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_hidden_layers": 2}
    config = transformers.SiglipConfig(text_config=words, vision_config={**IMAGES, "num_hidden_layers": 3})
    return transformers.SiglipModel(config)


def t5(**options: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        **{"dropout_rate": 0.0, **options},
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=12,
        max_target_positions=LENGTH,
        decoder_start_token_id=1,
        **SPECIAL,
    )
    return transformers.WhisperForConditionalGeneration(config)


def gpt2() -> nn.Module:
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2, **drops
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**DECODER, **SPECIAL, num_hidden_layers=4, tie_word_embeddings=False, **options)
    return transformers.LlamaForCausalLM(config)


def qwen2() -> nn.Module:
    config = transformers.Qwen2Config(**DECODER, **SPECIAL, num_hidden_layers=4, tie_word_embeddings=False)
    return transformers.Qwen2ForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **WIDTH,
        vocab_size=WORDS,
        max_position_embeddings=16,
        num_hidden_layers=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        **IMAGES, num_hidden_layers=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.ViTForImageClassification(config)


def mixtral(experts: str = "grouped_mm", layers: int = 4) -> nn.Module:
    """``experts``: by one grouped product, or "eager", a loop over those that the tokens chose."""
    config = transformers.MixtralConfig(
        **DECODER,
        **SPECIAL,
        num_hidden_layers=layers,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=ROUTER,
        experts_implementation=experts,
    )
    return transformers.MixtralForCausalLM(config)


def qwen3_moe(experts: str = "grouped_mm", layers: int = 4) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **DECODER,
        **SPECIAL,
        head_dim=4,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=ROUTER,
        tie_word_embeddings=False,
        experts_implementation=experts,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3(experts: str = "grouped_mm", layers: int = 2) -> nn.Module:
    """Layers of experts, of which one is shared by all tokens."""
    config = transformers.DeepseekV3Config(
        **DECODER | {"num_key_value_heads": 4},
        **SPECIAL,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        first_k_dense_replace=0,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        tie_word_embeddings=False,
        experts_implementation=experts,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def gpt_oss(experts: str = "grouped_mm", layers: int = 2) -> nn.Module:
    """Its experts have biases."""
    config = transformers.GptOssConfig(
        **DECODER,
        **SPECIAL,
        head_dim=4,
        num_hidden_layers=layers,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=ROUTER,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        experts_implementation=experts,
    )
    model = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            nn.init.normal_(parameter)  # zeros at first
    return model


def llava() -> nn.Module:
    words = {**DECODER, **SPECIAL, "num_hidden_layers": 3, "model_type": "llama", "tie_word_embeddings": False}
    config = transformers.LlavaConfig(
        vision_config={**IMAGES, "num_hidden_layers": 3, "model_type": "clip_vision_model"},
        text_config=words,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=PATCHES,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    rotation = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    words = {**DECODER, **SPECIAL, "num_hidden_layers": 4, "rope_parameters": rotation, "tie_word_embeddings": False}
    images = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=words,
        vision_config=images,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        tie_word_embeddings=False,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


# --- the table ---


def layers(path: str, *places: int) -> dict[str, Any]:
    """Cut before those of the layers of ``path``."""
    return {f"{path}.{place}": "before" for place in places}


SGD = {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.1}}
"""Where gradients are equal to rounding: Adam makes a whole step out of a gradient that is nothing but rounding."""
ROUNDING = 1e-6
TOWERS = {"vision_model.encoder.layers.2": "before"}

MODELS: Mapping[str, HFCase] = {
    "CLIP": HFCase(
        clip, pairs, boundaries={**TOWERS, "visual_projection": "after", "text_projection": "after"}, stages=4
    ),
    "SigLIP": HFCase(siglip, pairs, boundaries={**TOWERS, "vision_model": "after", "text_model": "after"}, stages=4),
    "T5": HFCase(
        t5,
        translated,
        boundaries={**layers("encoder.block", 1), "encoder": "after", **layers("decoder.block", 1)},
        stages=4,
        tolerance=5e-6,  # tied; every block of the decoder uses the encoder's output, every block its stack's biases
        **SGD,
    ),
    "Whisper": HFCase(
        whisper,
        transcribed,
        boundaries={**layers("model.encoder.layers", 1), "model.encoder": "after", **layers("model.decoder.layers", 1)},
        stages=4,
        tolerance=ROUNDING,  # likewise
        **SGD,
    ),
    "GPT-2": HFCase(
        gpt2,
        causal,
        boundaries=layers("transformer.h", 1, 2, 3),
        items=predicted_labels,
        tolerance=ROUNDING,  # tied: the first stage's embedding is the last stage's head
        **SGD,
    ),
    "Llama": HFCase(llama, causal, boundaries={"model.layers.*": {"every": 1}}, items=predicted_labels),
    "Qwen2": HFCase(qwen2, causal, boundaries=layers("model.layers", 1, 2, 3), items=predicted_labels),
    "BERT": HFCase(
        bert,
        masked_words,
        boundaries=layers("bert.encoder.layer", 1, 2, 3),
        tolerance=ROUNDING,  # tied
        **SGD,
    ),
    "ViT": HFCase(vit, classes, boundaries=layers("vit.layers", 1, 2, 3), items=every_label),
    "Mixtral": HFCase(
        mixtral,
        causal,
        boundaries=layers("model.layers", 1, 2, 3),
        items=predicted_labels,
        auxiliary=ROUTER,
        tolerance=ROUNDING,  # the reference takes the auxiliary loss from a sum that it is in
        **SGD,
    ),
    "LLaVA": HFCase(
        llava,
        images_in_text,
        boundaries={
            **layers("model.vision_tower.encoder.layers", 1),
            "model.multi_modal_projector": "after",
            **layers("model.language_model.layers", 1, 2),
        },
        stages=5,
        items=predicted_labels,
    ),
    "Qwen2-VL": HFCase(
        qwen2_vl, causal, boundaries=layers("model.language_model.layers", 1, 2, 3), items=predicted_labels
    ),
}
"""Qwen2-VL is given texts only; its images make Python loops over the numbers of a tensor, see ``IMAGES_BY_GRID``."""

IMAGES_BY_GRID = replace(MODELS["Qwen2-VL"], inputs=patches_in_text)


# --- the reference ---


Around = Callable[[], contextlib.AbstractContextManager[Any]]


def trained_plainly(case: HFCase, batches: Sequence[Inputs], around: Around = contextlib.nullcontext) -> Run:
    """The loop over micro-batches that a pipeline replaces.

    Losses are weighted by rows; or, where the model divides by it, each gets the number of labels of the whole batch,
    and an auxiliary loss beside that is weighted by rows.
    ``around``: what each forward runs in.
    """
    model = case.model().train()
    optimizer = case.optimizer(model.parameters(), **case.optimizer_options)
    run = Run()
    for batch in batches:
        optimizer.zero_grad()
        loss, metrics = step_plainly(case, model, batch, around)
        run.losses.append(loss)
        run.metrics.append(metrics)
        run.gradients.append(gradients_of(model.named_parameters(remove_duplicate=False)))
        optimizer.step()
    run.state = model.state_dict()
    return run


def step_plainly(case: HFCase, model: nn.Module, batch: Inputs, around: Around) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward of each micro-batch; the loss of the batch, and the other scalars weighted by rows."""
    items = case.labels_of(batch)

    def call(_: int, part: Inputs) -> Inputs:
        with around():
            output = model(**part) if items is None else model(**part, num_items_in_batch=items)
        return {name: value for name, value in output.items() if isinstance(value, Tensor) and not value.dim()}

    parts = cut(batch, case.microbatches)
    if items is None:
        return accumulate(call, parts)
    losses, metrics = [], {}
    for place, part in enumerate(parts):
        output, share = call(place, part), rows_of(part) / rows_of(batch)
        loss = output.pop("loss")
        if case.auxiliary:  # the Trainer would add it up over micro-batches; it is a mean over rows
            loss = loss - (1 - share) * case.auxiliary * output["aux_loss"]
        loss.backward()
        losses.append(loss.detach())
        for name, value in output.items():
            metrics[name] = metrics.get(name, 0.0) + value.detach() * share
    return sum(losses[1:], start=losses[0]), metrics


def drop_what_is_only_rounding(run: Run) -> None:
    """A bias of keys, which starts at 0, has no gradient: softmax takes it away, but for rounding."""
    for tensors in [*run.gradients, run.state]:
        for tensor in tensors.values():
            if tensor is not None and tensor.is_floating_point() and tensor.abs().max() < 1e-9:
                tensor.zero_()


# --- capturing ---


def request_of(model: nn.Module, batch: Inputs, boundaries: Boundaries = ()) -> Request:
    """What a tracer is asked for a model that is given micro-batches like that one."""
    given = describe(batch, exact=True)
    inputs = {name: value.spec for name, value in given if value.kind == "input"}
    fixed = {name: value.detail for name, value in given if value.kind != "input"}
    return Request(model, tuple(inputs), fixed, example=inputs, cuts=resolve(model, boundaries).cuts)
