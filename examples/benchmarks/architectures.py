"""Architectures of transformers beyond those of the tests, tiny and with random weights, for ``tracers.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the models of the tests

from tests.hf import (
    DECODER,
    IMAGE_TOKEN,
    IMAGES,
    LENGTH,
    PATCHES,
    SPECIAL,
    WIDTH,
    WORDS,
    HFCase,
    causal,
    classes,
    images_in_text,
    layers,
    masked_words,
    translated,
)
from tests.models import Inputs

ROUNDING = 1e-5
"""Parameters are tied, values used by several stages, and a loss is a mean here and a sum over a count there."""
GPT = {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 4, **SPECIAL}
BERT = {**WIDTH, "vocab_size": WORDS, "max_position_embeddings": 16, "num_hidden_layers": 4, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPEECH = {
    **WIDTH,
    "num_hidden_layers": 3,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 5,
    "classifier_proj_size": 8,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    **dict.fromkeys(
        ["hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"], 0.0
    ),
}


def case(name: str, kind: str, inputs: Callable[..., Inputs], boundaries: Any, **options: Any) -> HFCase:
    """The model ``name`` + ``kind`` of transformers, with that configuration."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
        return model

    return HFCase(make, inputs, boundaries=boundaries, tolerance=ROUNDING)


def decoder(name: str, path: str = "model.layers", **options: Any) -> HFCase:
    return case(name, "ForCausalLM", causal, layers(path, 1, 2, 3), **options)


def llama_like(name: str, **options: Any) -> HFCase:
    return decoder(name, **{**DECODER, **SPECIAL, "num_hidden_layers": 4, **options})


def encoder(name: str, path: str, **options: Any) -> HFCase:
    return case(name, "ForMaskedLM", masked_words, layers(path, 1, 2, 3), **options)


def speech(name: str) -> HFCase:
    return case(name, "ForSequenceClassification", sounds, layers(f"{name.lower()}.encoder.layers", 1, 2), **SPEECH)


def image_classes(name: str, boundaries: Any, **options: Any) -> HFCase:
    return case(name, "ForImageClassification", classes, boundaries, **{"num_labels": 5, **options})


# --- batches ---


def sounds(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "input_values": torch.randn(rows, 400, generator=generator),
        "labels": torch.randint(0, 5, (rows,), generator=generator),
    }


def large_images(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 5, (rows,), generator=generator),
    }


def segmented(rows: int, generator: torch.Generator) -> Inputs:
    return large_images(rows, generator) | {"labels": torch.randint(0, 5, (rows, 32, 32), generator=generator)}


def described(rows: int, generator: torch.Generator) -> Inputs:
    batch = causal(rows, generator)
    return batch | {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator)}


def pictures_by_kind(rows: int, generator: torch.Generator) -> Inputs:
    batch = images_in_text(rows, generator)
    return batch | {"token_type_ids": (batch["input_ids"] == IMAGE_TOKEN).long()}


def one_token_an_image(rows: int, generator: torch.Generator) -> Inputs:
    batch = images_in_text(rows, generator)
    texts = {name: value[:, PATCHES - 1 :] for name, value in batch.items() if name != "pixel_values"}
    return texts | {"pixel_values": batch["pixel_values"][:, None]}


# --- models ---

_KINDS = ["sliding_attention", "full_attention"] * 2
_GEMMA = {**DECODER, "head_dim": 4, "num_hidden_layers": 4, "sliding_window": 4, "layer_types": _KINDS}
_TEXTS = {**DECODER, **SPECIAL, "num_hidden_layers": 4, "model_type": "llama"}
_FEW_IMAGES = {**IMAGES, "num_hidden_layers": 2}


def gemma3() -> nn.Module:
    config = transformers.Gemma3Config(
        text_config=_GEMMA,
        vision_config=_FEW_IMAGES,
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=44,
        eoi_token_index=43,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def idefics3() -> nn.Module:
    config = transformers.Idefics3Config(
        text_config=_TEXTS, vision_config=_FEW_IMAGES, image_token_id=IMAGE_TOKEN, scale_factor=2, pad_token_id=0
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def smolvlm() -> nn.Module:
    config = transformers.SmolVLMConfig(
        text_config=_TEXTS, vision_config=_FEW_IMAGES, image_token_id=IMAGE_TOKEN, scale_factor=2, pad_token_id=0
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def of(make: Callable[[], nn.Module], inputs: Callable[..., Inputs], boundaries: Any) -> HFCase:
    return HFCase(make, inputs, boundaries=boundaries, tolerance=ROUNDING)


_STAGES = {"hidden_sizes": [8, 16], "depths": [2, 2]}

MORE: Mapping[str, HFCase] = {
    "Mistral": llama_like("Mistral"),
    "Gemma 2": llama_like("Gemma2", **_GEMMA),
    "Gemma 3": of(
        lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_GEMMA)),
        causal,
        layers("model.layers", 1, 2, 3),
    ),
    "Gemma 3, images": of(gemma3, pictures_by_kind, layers("model.language_model.layers", 1, 2)),
    "Qwen3": llama_like("Qwen3", head_dim=4),
    "Phi-3": llama_like("Phi3"),
    "OLMo 2": llama_like("Olmo2"),
    "StableLM": llama_like("StableLm"),
    "GPT-NeoX": decoder(
        "GPTNeoX", "gpt_neox.layers", **GPT, intermediate_size=32, max_position_embeddings=32, hidden_dropout=0.0
    ),
    "GPT-J": decoder(
        "GPTJ",
        "transformer.h",
        **SPECIAL,
        vocab_size=WORDS,
        n_positions=32,
        n_embd=16,
        n_layer=4,
        n_head=4,
        rotary_dim=4,
        **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0),
    ),
    "OPT": decoder(
        "OPT",
        "model.decoder.layers",
        **{**GPT, "ffn_dim": 32, "max_position_embeddings": 32, "dropout": 0.0, "word_embed_proj_dim": 16},
    ),
    "BLOOM": decoder("Bloom", "transformer.h", **SPECIAL, vocab_size=WORDS, hidden_size=16, n_layer=4, n_head=4),
    "Falcon": decoder("Falcon", "transformer.h", **GPT),
    "Mamba": decoder(
        "Mamba", "backbone.layers", vocab_size=WORDS, hidden_size=16, num_hidden_layers=4, state_size=4, **SPECIAL
    ),
    "RoBERTa": encoder(
        "Roberta", "roberta.encoder.layer", **{**BERT, "max_position_embeddings": 32, "pad_token_id": 0}, **NO_DROPOUT
    ),
    "ELECTRA": encoder("Electra", "electra.encoder.layer", **BERT, embedding_size=16, **NO_DROPOUT),
    "ALBERT": case(
        "Albert",
        "ForMaskedLM",
        masked_words,
        {"albert.encoder": "before", "predictions": "before"},
        **BERT,
        embedding_size=8,
        **NO_DROPOUT,
    ),
    "DeBERTa-v2": encoder("DebertaV2", "deberta.encoder.layer", **BERT, **NO_DROPOUT),
    "DistilBERT": encoder(
        "DistilBert",
        "distilbert.transformer.layer",
        vocab_size=WORDS,
        dim=16,
        hidden_dim=32,
        n_layers=4,
        n_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "BART": case(
        "Bart",
        "ForConditionalGeneration",
        translated,
        {**layers("model.encoder.layers", 1), "model.encoder": "after", **layers("model.decoder.layers", 1)},
        vocab_size=WORDS,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=2 * LENGTH,
        dropout=0.0,
        **SPECIAL,
        decoder_start_token_id=1,
    ),
    "wav2vec2": speech("Wav2Vec2"),
    "HuBERT": speech("Hubert"),
    "WavLM": speech("WavLM"),
    "DeiT": image_classes("DeiT", layers("deit.layers", 1, 2, 3), **IMAGES, num_hidden_layers=4, **NO_DROPOUT),
    "BEiT": image_classes(
        "Beit", layers("beit.layers", 1, 2, 3), **IMAGES, num_hidden_layers=4, drop_path_rate=0.0, **NO_DROPOUT
    ),
    "DINOv2": image_classes(
        "Dinov2",
        layers("dinov2.encoder.layer", 1, 2, 3),
        hidden_size=16,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=8,
        patch_size=4,
        num_hidden_layers=4,
    ),
    "ResNet": case(
        "ResNet",
        "ForImageClassification",
        large_images,
        {"resnet.encoder.stages.1": "before"},
        embedding_size=8,
        **_STAGES,
        layer_type="basic",
        num_labels=5,
    ),
    "ConvNeXt": case(
        "ConvNext",
        "ForImageClassification",
        large_images,
        {"convnext.encoder.stages.1": "before"},
        **_STAGES,
        num_stages=2,
        num_labels=5,
    ),
    "Swin": case(
        "Swin",
        "ForImageClassification",
        large_images,
        {"swin.encoder.layers.1": "before"},
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=5,
    ),
    "SegFormer": case(
        "Segformer",
        "ForSemanticSegmentation",
        segmented,
        {"decode_head": "before"},
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=5,
    ),
    "Idefics 3": of(idefics3, one_token_an_image, layers("model.text_model.layers", 1, 2)),
    "SmolVLM": of(smolvlm, one_token_an_image, layers("model.text_model.layers", 1, 2)),
}
