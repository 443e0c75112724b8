"""The model families of compatibility.py: tiny, with random weights; each has a batch and a cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the models of the tests

import architectures
import opaque_regions

from fxpipe import Packed
from tests import hf
from tests.hf import DECODER, IMAGE_TOKEN, IMAGES, NONE_LEFT, PATCHES, SPECIAL, WIDTH, WORDS
from tests.models import Inputs

Batch = Callable[[int, torch.Generator], Inputs]
"""(place of a micro-batch, generator) → it. The place decides lengths and numbers of images."""
ROWS = 2
BY_COLUMN = ["input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids", "decoder_input_ids"]


@dataclass(frozen=True)
class Family:
    """``boundaries``: None for one cut amid the list of modules with the most parameters. ``loss``: of output and
    ``target``, for models without one. ``rules``: for ``batch_dim``.

    ``loss_alone``: evaluation gives the loss, for without ``target`` it would have other stages or parameters.
    """

    library: str
    build: Callable[[], nn.Module]
    batch: Batch
    boundaries: Any = None
    loss: Callable[..., Tensor] | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)
    loss_alone: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if hasattr(part, "dropout_prob"):  # of labels
                part.dropout_prob = 0.0
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # a norm would make numbers of rounding alone
                nn.init.normal_(parameter, std=0.05)
        return model

    def cuts(self, model: nn.Module) -> Any:
        return amid(model) if self.boundaries is None else self.boundaries

    def loss_of(self, model: nn.Module, batch: Inputs) -> Tensor:
        if self.loss is None:
            return model(**batch)["loss"]  # type: ignore[no-any-return]
        inputs = {name: value for name, value in batch.items() if name != "target"}
        return self.loss(model(**inputs), target=batch["target"])


def amid(model: nn.Module) -> Any:
    """A cut before the middle one of the list of modules with the most parameters; "auto" where there is no list."""
    lists = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in model.named_modules()
        if name and isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    }
    if not lists:
        return "auto"
    name = max(lists, key=lambda name: lists[name])
    return {f"{name}.{len(model.get_submodule(name)) // 2}": "before"}  # type: ignore[arg-type]


def still(config: Any) -> Any:
    """A configuration without dropout and caches, in all its parts."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            still(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name == "use_cache":
            config.use_cache = False
    return config


def of(
    name: str, kind: str, batch: Batch, *, boundaries: Any = None, loss: Any = None, rules: Any = None, **options: Any
) -> Family:
    """The model ``name`` + ``kind`` of transformers, with that configuration."""

    def build() -> nn.Module:
        config = still(getattr(transformers, f"{name}Config")(**options))
        model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
        return model

    return Family("transformers", build, batch, boundaries, loss, rules or {}, loss_alone=loss is not None)


# --- batches ---


def shortened(inputs: Callable[[int, torch.Generator], Inputs]) -> Batch:
    """Texts are one word shorter with each place, sounds a tenth."""

    def batch(place: int, generator: torch.Generator) -> Inputs:
        made = dict(inputs(ROWS, generator))
        for name in BY_COLUMN:
            if place and isinstance(made.get(name), Tensor) and made[name].dim() == 2:
                made[name] = made[name][:, :-place].contiguous()
        if "input_values" in made:
            made["input_values"] = made["input_values"][:, : -40 * place or None].contiguous()
        return made

    return batch


def counted(batch: opaque_regions.opaque_regions.Batch) -> Batch:
    """Of one, two and three images."""
    return lambda place, generator: batch([max(place, 1), min(place, 1)], generator)


def doubled(place: int, generator: torch.Generator) -> Inputs:
    """Masked words, every text twice."""
    return {name: torch.cat([value, value], 1) for name, value in masked(place, generator).items()}


causal, masked, translated = shortened(hf.causal), shortened(hf.masked_words), shortened(hf.translated)


def labels(generator: torch.Generator, *shape: int, most: int = 5) -> Tensor:
    return torch.randint(1, most, shape, generator=generator)


def images_and(count: Callable[..., Any] | None = None, tokens: int = PATCHES, side: int = 8, **more: Any) -> Batch:
    """Texts with one, two and three images, so many tokens each. ``count``: of what an image is."""

    def batch(counts: Any, generator: torch.Generator) -> Inputs:
        made = opaque_regions.texts(counts, tokens, generator)
        shape = more.get("shape", (3, side, side))
        made[more.get("name", "pixel_values")] = torch.randn(sum(counts), *shape, generator=generator)
        if more.get("sizes"):
            made["image_sizes"] = torch.full((sum(counts), 2), side)
        return made

    return counted(batch)


def per_row(tokens: int, *names: str) -> dict[str, Any]:
    """How such inputs, one row for an image, are dealt out."""
    return dict.fromkeys(names, Packed(lambda input_ids: (input_ids == IMAGE_TOKEN).sum(1) // tokens))


def spoken(place: int, generator: torch.Generator) -> Inputs:
    """Sounds, padded, and words that are in them, padded, for CTC."""
    length = 400 - 40 * place
    mask = (torch.arange(length) < torch.tensor([[length], [length - 100]])).long()
    words = labels(generator, ROWS, 4 - place, most=WORDS)
    words[1, 2 - place :] = NONE_LEFT
    sound = torch.randn(ROWS, length, generator=generator) * mask
    return {"input_values": sound, "attention_mask": mask, "labels": words}


def detected(place: int, generator: torch.Generator) -> Inputs:
    """Images with one, two and three boxes each, and a mask of their pixels."""
    boxes = [1 + (place + row) % 3 for row in range(ROWS)]
    corners = [torch.rand(count, 4, generator=generator) * 0.3 + 0.2 for count in boxes]
    mask = torch.ones(ROWS, 64, 64, dtype=torch.long)
    mask[1, :, 48:] = 0
    return {
        "pixel_values": torch.randn(ROWS, 3, 64, 64, generator=generator),
        "pixel_mask": mask,
        "labels": [{"class_labels": labels(generator, len(one), most=5), "boxes": one} for one in corners],
    }


def detected_unmasked(place: int, generator: torch.Generator) -> Inputs:
    return {name: value for name, value in detected(place, generator).items() if name != "pixel_mask"}


def masks_in_images(place: int, generator: torch.Generator) -> Inputs:
    counts = [1 + (place + row) % 3 for row in range(ROWS)]
    return {
        "pixel_values": torch.randn(ROWS, 3, 64, 64, generator=generator),
        "mask_labels": [(torch.rand(count, 64, 64, generator=generator) < 0.3).float() for count in counts],
        "class_labels": [labels(generator, count) for count in counts],
    }


def pointed_at(place: int, generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
        "input_points": torch.rand(ROWS, 1, 1 + place, 2, generator=generator) * 32,
        "multimask_output": False,
        "target": torch.randn(ROWS, 1, 1, 32, 32, generator=generator),
    }


def answers(place: int, generator: torch.Generator) -> Inputs:
    words = shortened(hf.text)(place, generator)
    truth = torch.rand(ROWS, 5, generator=generator)
    return {**words, "pixel_values": hf.pixels(ROWS, generator), "labels": truth}


def patches_of_sizes(place: int, generator: torch.Generator) -> Inputs:
    """Images of 2 × 2 and 1 × 3 patches, and texts."""
    words = shortened(hf.text)(place, generator)
    shapes = torch.tensor([[2, 2], [1, 3]])
    mask = (torch.arange(4) < shapes.prod(1, keepdim=True)).long()
    patches = torch.randn(ROWS, 4, 48, generator=generator) * mask[..., None]
    images = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes, "return_loss": True}
    return {**words, **images}


def noised(place: int, generator: torch.Generator) -> Inputs:
    noise = torch.rand(ROWS, 4, generator=generator)
    return {"pixel_values": hf.pixels(ROWS, generator), "noise": noise}


def films(place: int, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(ROWS, 4, 3, 8, 8, generator=generator), "labels": labels(generator, ROWS)}


def read_globally(place: int, generator: torch.Generator) -> Inputs:
    """Every word of the first column is seen by all."""
    made = translated(place, generator)
    everywhere = torch.zeros_like(made["input_ids"])
    everywhere[:, 0] = 1
    return {**made, "global_attention_mask": everywhere}


def drawn(*shape: int, target: tuple[int, ...] | None = None, **others: Any) -> Batch:
    """``sample``-like inputs of diffusers: name → shape; whole numbers are below 10."""

    def batch(place: int, generator: torch.Generator) -> Inputs:
        made: Inputs = {}
        for name, one in others.items():
            whole = one[:1] == (int,)
            size = (ROWS, *(one[1:] if whole else one))
            made[name] = labels(generator, *size, most=10) if whole else torch.randn(size, generator=generator)
        made["target"] = torch.randn(ROWS, *(target or shape), generator=generator)
        return made

    return batch


def placed(place: int, generator: torch.Generator) -> Inputs:
    """Patches and words with their places, which are those of every row."""
    make = drawn(16, 4, hidden_states=(16, 4), encoder_hidden_states=(6, 16), pooled_projections=(16,), timestep=())
    places = torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4)).float()
    return {**make(place, generator), "img_ids": places, "txt_ids": torch.zeros(6, 3)}


def squares(output: Any, target: Tensor) -> Tensor:
    """Of a diffusion model."""
    return torch.nn.functional.mse_loss(output.sample, target)


def squared_masks(output: Any, target: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(output["pred_masks"][..., :32, :32], target)


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(output, target)


def photographs(place: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn(ROWS, 3, 64, 64, generator=generator), "target": labels(generator, ROWS)}


# --- of transformers ---

LLAMA = {**DECODER, **SPECIAL, "num_hidden_layers": 4}
MIXED = {**LLAMA, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
BART = {
    **SPECIAL,
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
BERT = architectures.BERT
FEW = {**IMAGES, "num_hidden_layers": 2, "initializer_range": 0.02}
SPEECH = {**architectures.SPEECH, "vocab_size": WORDS, "pad_token_id": 0}
TEXTS = {**LLAMA, "model_type": "llama", "tie_word_embeddings": False}
ROTATION = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
DETECTOR = {
    "num_labels": 5,
    "d_model": 16,
    "num_queries": 5,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
STAGES4 = ["stage1", "stage2", "stage3", "stage4"]
LISTS = {"labels": Packed(1)}


def llama_like(name: str, **options: Any) -> Family:
    return of(name, "ForCausalLM", causal, **{**LLAMA, **options})


def bart_like(name: str, kind: str = "ForConditionalGeneration", **options: Any) -> Family:
    return of(name, kind, translated, **{**BART, **options})


def spoken_by(name: str, **options: Any) -> Family:
    return of(name, "ForCTC", spoken, **{**SPEECH, "ctc_loss_reduction": "mean", **options})


MORE: dict[str, Family] = {
    "Gemma": llama_like("Gemma", head_dim=4),
    "Granite": llama_like("Granite"),
    "Cohere": llama_like("Cohere"),
    "SmolLM 3": llama_like("SmolLM3"),
    "StarCoder 2": llama_like("Starcoder2"),
    "GLM-4": llama_like("Glm4", head_dim=4),
    "Nemotron": llama_like("Nemotron"),
    "EXAONE 4": llama_like("Exaone4"),
    "GPT-OSS": llama_like("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=4, sliding_window=4),
    "OLMoE": llama_like("Olmoe", num_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": llama_like("Qwen2Moe", **MIXED, shared_expert_intermediate_size=16),
    "Qwen3-MoE": llama_like("Qwen3Moe", **MIXED, head_dim=4),
    "DeepSeek-V2": llama_like(
        "DeepseekV2", **LATENT, **ROUTED, num_key_value_heads=4, moe_intermediate_size=16, head_dim=4
    ),
    "DeepSeek-V3": llama_like("DeepseekV3", **LATENT, **ROUTED, num_key_value_heads=4, moe_intermediate_size=16),
    "Phi": llama_like("Phi"),
    "GPT-Neo": of(
        "GPTNeo",
        "ForCausalLM",
        causal,
        **SPECIAL,
        vocab_size=WORDS,
        hidden_size=16,
        num_layers=4,
        num_heads=4,
        max_position_embeddings=32,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
    ),
    "Mamba 2": of(
        "Mamba2",
        "ForCausalLM",
        causal,
        **SPECIAL,
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=4,
        state_size=4,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    "RWKV": of(
        "Rwkv",
        "ForCausalLM",
        causal,
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=4,
        context_length=32,
        **SPECIAL,
    ),
    "Qwen3-Next": llama_like(
        "Qwen3Next",
        **MIXED,
        head_dim=4,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    ),
    "BigBird": of(
        "BigBird",
        "ForMaskedLM",
        doubled,
        **{**BERT, "max_position_embeddings": 64},
        attention_type="block_sparse",
        block_size=1,
        num_random_blocks=1,
    ),
    "ModernBERT": of("ModernBert", "ForMaskedLM", masked, **{**BERT, **SPECIAL}, local_attention=4),
    "XLM-RoBERTa": of("XLMRoberta", "ForMaskedLM", masked, **{**BERT, "max_position_embeddings": 32}),
    "ESM": of(
        "Esm", "ForMaskedLM", masked, **{**BERT, "max_position_embeddings": 32}, mask_token_id=3, token_dropout=False
    ),
    "MPNet": of("MPNet", "ForMaskedLM", masked, **{**BERT, "max_position_embeddings": 32}),
    "Pegasus": bart_like("Pegasus"),
    "Marian": of("Marian", "MTModel", translated, **BART, decoder_vocab_size=WORDS),
    "mBART": bart_like("MBart"),
    "M2M-100": bart_like("M2M100"),
    "LED": of(
        "LED",
        "ForConditionalGeneration",
        read_globally,
        **BART,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
        attention_window=4,
    ),
    "mT5": of("MT5", "ForConditionalGeneration", translated, **T5, decoder_start_token_id=0),
    "Switch Transformers": of(
        "SwitchTransformers",
        "ForConditionalGeneration",
        translated,
        **T5,
        decoder_start_token_id=0,
        num_decoder_layers=2,
        num_experts=4,
        router_jitter_noise=0.0,
    ),
    "LongT5": of("LongT5", "ForConditionalGeneration", translated, **T5, decoder_start_token_id=0, local_radius=3),
    "wav2vec2, CTC": spoken_by("Wav2Vec2"),
    "HuBERT, CTC": spoken_by("Hubert"),
    "WavLM, CTC": spoken_by("WavLM"),
    "SEW, CTC": spoken_by("SEW", squeeze_factor=2),
    "UniSpeech, CTC": spoken_by("UniSpeech", num_ctc_classes=WORDS),
    "wav2vec2-Conformer, CTC": spoken_by("Wav2Vec2Conformer"),
    "BLIP": of(
        "Blip",
        "ForConditionalGeneration",
        shortened(architectures.described),
        text_config={
            **WIDTH,
            "vocab_size": WORDS,
            "encoder_hidden_size": 16,
            "max_position_embeddings": 32,
            "num_hidden_layers": 4,
            **SPECIAL,
        },
        vision_config=FEW,
    ),
    "BLIP-2": of(
        "Blip2",
        "ForConditionalGeneration",
        shortened(hf.images_in_text),
        text_config={
            **architectures.GPT,
            "model_type": "opt",
            "ffn_dim": 32,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
        },
        vision_config=FEW,
        qformer_config={**WIDTH, "vocab_size": WORDS, "num_hidden_layers": 2, "encoder_hidden_size": 16},
        num_query_tokens=PATCHES,
        image_token_index=IMAGE_TOKEN,
    ),
    "SigLIP 2": of(
        "Siglip2",
        "Model",
        patches_of_sizes,
        text_config={
            **WIDTH,
            **SPECIAL,
            "vocab_size": WORDS,
            "max_position_embeddings": 32,
            "num_hidden_layers": 2,
            "projection_size": 16,
        },
        vision_config={**WIDTH, "num_hidden_layers": 3, "patch_size": 4, "num_patches": 4},
    ),
    "AltCLIP": of(
        "AltCLIP",
        "Model",
        shortened(hf.pairs),
        text_config={**BERT, "max_position_embeddings": 32, "pad_token_id": 0, "project_dim": 16},
        vision_config={**FEW, "projection_dim": 16},
        projection_dim=16,
    ),
    "Chinese-CLIP": of(
        "ChineseCLIP",
        "Model",
        shortened(hf.pairs),
        text_config=BERT,
        vision_config={**FEW, "projection_dim": 16},
        projection_dim=16,
    ),
    "ViLT": of("Vilt", "ForQuestionAnswering", answers, **BERT, image_size=8, patch_size=4, num_labels=5),
    "Voxtral": of(
        "Voxtral",
        "ForConditionalGeneration",
        images_and(tokens=6, name="input_features", shape=(8, 24)),
        rules=per_row(6, "input_features"),
        text_config=TEXTS,
        audio_config={**WIDTH, "num_hidden_layers": 2, "num_mel_bins": 8, "max_source_positions": 12},
        audio_token_id=IMAGE_TOKEN,
    ),
    "LLaVA-NeXT": of(
        "LlavaNext",
        "ForConditionalGeneration",
        images_and(tokens=10, shape=(2, 3, 8, 8), sizes=True),
        rules=per_row(10, "pixel_values", "image_sizes"),
        text_config=TEXTS,
        vision_config={**FEW, "model_type": "clip_vision_model"},
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=[[8, 8]],
        image_seq_length=PATCHES,
    ),
    "Mistral 3": of(
        "Mistral3",
        "ForConditionalGeneration",
        images_and(side=16, sizes=True),
        rules=per_row(PATCHES, "pixel_values", "image_sizes"),
        text_config={**TEXTS, "model_type": "mistral", "head_dim": 4},
        vision_config={**FEW, "model_type": "pixtral", "image_size": 16, "head_dim": 4},
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
    ),
    "InternVL": of(
        "InternVL",
        "ForConditionalGeneration",
        images_and(tokens=1),
        rules=per_row(1, "pixel_values"),
        text_config={**TEXTS, "model_type": "qwen2"},
        vision_config={**FEW, "image_size": [8, 8], "patch_size": [4, 4]},
        image_token_id=IMAGE_TOKEN,
        image_seq_length=1,
    ),
    "Qwen3-VL": of(
        "Qwen3VL",
        "ForConditionalGeneration",
        counted(opaque_regions.by_grid),
        boundaries=hf.layers("model.language_model.layers", 2),
        rules=opaque_regions.GRIDS,
        text_config={**LLAMA, "head_dim": 4, "rope_parameters": ROTATION},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=hf.VIDEO_TOKEN,
    ),
    "DETR": of(
        "Detr",
        "ForObjectDetection",
        detected,
        boundaries=hf.layers("model.encoder.layers", 1),
        rules=LISTS,
        **DETECTOR,
        backbone_config={**RESNET, "out_features": ["stage4"]},
    ),
    "Deformable DETR": of(
        "DeformableDetr",
        "ForObjectDetection",
        detected,
        rules=LISTS,
        **{**DETECTOR, "d_model": 32},
        backbone_config={**RESNET, "out_features": STAGES4[1:]},
        disable_custom_kernels=True,
    ),
    "RT-DETR": of(
        "RTDetr",
        "ForObjectDetection",
        detected_unmasked,
        boundaries=hf.layers("model.decoder.layers", 1),
        rules=LISTS,
        **{**DETECTOR, "decoder_layers": 4},
        backbone_config={**RESNET, "model_type": "rt_detr_resnet", "out_features": STAGES4[1:]},
        encoder_in_channels=[8, 16, 16],
        encoder_hidden_dim=16,
        decoder_in_channels=[16, 16, 16],
        num_denoising=0,
    ),
    "Mask2Former": of(
        "Mask2Former",
        "ForUniversalSegmentation",
        masks_in_images,
        rules={"mask_labels": Packed(1), "class_labels": Packed(1)},
        backbone_config={
            "model_type": "swin",
            "image_size": 64,
            "embed_dim": 8,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 2, 2],
            "window_size": 4,
            "drop_path_rate": 0.0,
            "out_features": STAGES4,
        },
        num_labels=5,
        num_queries=5,
        **dict.fromkeys(["feature_size", "mask_feature_size", "hidden_dim"], 32),
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=4,
        train_num_points=32,
    ),
    "SAM": of(
        "Sam",
        "Model",
        pointed_at,
        loss=squared_masks,
        vision_config={
            **WIDTH,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "image_size": 32,
            "patch_size": 4,
            "window_size": 4,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
            "mlp_dim": 32,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    ),
    "ViT-MAE": of(
        "ViTMAE",
        "ForPreTraining",
        noised,
        **FEW,
        decoder_hidden_size=16,
        decoder_num_attention_heads=4,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=32,
        mask_ratio=0.5,
    ),
    "VideoMAE": of("VideoMAE", "ForVideoClassification", films, **FEW, num_frames=4, tubelet_size=2, num_labels=5),
    "TimeSformer": of("Timesformer", "ForVideoClassification", films, **FEW, num_frames=4, num_labels=5),
    "YOLOS": of(
        "Yolos",
        "ForObjectDetection",
        detected_unmasked,
        rules=LISTS,
        **{**FEW, "image_size": [64, 64], "patch_size": 16},
        num_detection_tokens=5,
        num_labels=5,
    ),
}

# --- of other libraries ---

LATENTS, SMALL = (4, 8, 8), {"norm_num_groups": 2, "layers_per_block": 1}
SPATIAL = {"hidden_states": (4, 8, 8), "timestep": (int,)}


def diffused(name: str, batch: Batch, *, rules: Any = None, **options: Any) -> Family:
    """A model of diffusers."""

    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**options)
        return model

    return Family("diffusers", build, batch, None, squares, rules or {})


def of_timm(name: str, *, boundaries: Any = None, **options: Any) -> Family:
    def build() -> nn.Module:
        import timm

        known = vars(timm.models).get(name) if name[0].isupper() else None  # a class, or a name of the registry
        model: nn.Module = (
            known(num_classes=5, **options) if known else timm.create_model(name, num_classes=5, **options)
        )
        return model

    return Family("timm", build, photographs, boundaries, entropy)


def open_clip_towers() -> dict[str, Any]:
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    return {
        "embed_dim": 16,
        "vision_cfg": CLIPVisionCfg(layers=2, width=16, head_width=4, patch_size=4, image_size=8),
        "text_cfg": CLIPTextCfg(context_length=8, vocab_size=WORDS, width=16, heads=4, layers=4),
    }


def open_clip() -> nn.Module:
    from open_clip import CLIP

    return CLIP(**open_clip_towers())


def coca() -> nn.Module:
    from open_clip import CoCa
    from open_clip.coca_model import MultimodalCfg
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    towers = open_clip_towers()
    pooled = {"attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 4, "output_tokens": True}
    towers["vision_cfg"] = CLIPVisionCfg(layers=2, width=16, head_width=4, patch_size=4, image_size=8, **pooled)
    words = {"embed_cls": True, "output_tokens": True}
    towers["text_cfg"] = CLIPTextCfg(context_length=8, vocab_size=WORDS, width=16, heads=4, layers=2, **words)
    layers = MultimodalCfg(context_length=8, vocab_size=WORDS, width=16, heads=4, layers=2)
    model = CoCa(multimodal_cfg=layers, **towers)
    for parameter in model.parameters():  # some are left as memory had them
        nn.init.normal_(parameter, std=0.05)
    return model


def captioned(place: int, generator: torch.Generator) -> Inputs:
    image, text = torch.randn(ROWS, 3, 8, 8, generator=generator), labels(generator, ROWS, 8, most=WORDS)
    return {"image": image, "text": text, "target": torch.arange(ROWS)}


def contrast(output: Any, target: Tensor) -> Tensor:
    image, text, scale = output[:3]
    return torch.nn.functional.cross_entropy(scale * image @ text.T, target)


def contrast_and_caption(output: Any, target: Tensor) -> Tensor:
    pairs = output["image_features"], output["text_features"], output["logit_scale"]
    words = torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), output["labels"].flatten())
    return contrast(pairs, target) + words


OTHERS: dict[str, Family] = {
    "UNet2DModel": diffused(
        "UNet2DModel",
        drawn(4, 8, 8, sample=(4, 8, 8), timestep=(int,)),
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **SMALL,
    ),
    "UNet2DConditionModel": diffused(
        "UNet2DConditionModel",
        drawn(4, 8, 8, sample=(4, 8, 8), timestep=(int,), encoder_hidden_states=(6, 16)),
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        **SMALL,
    ),
    "AutoencoderKL": diffused(
        "AutoencoderKL",
        drawn(3, 16, 16, sample=(3, 16, 16)),
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        **SMALL,
    ),
    "DiT": diffused(
        "DiTTransformer2DModel",
        drawn(4, 8, 8, **SPATIAL, class_labels=(int,)),
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=4,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=2,
    ),
    "PixArt": diffused(
        "PixArtTransformer2DModel",
        drawn(4, 8, 8, **SPATIAL, encoder_hidden_states=(6, 16)),
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=4,
        out_channels=4,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=16,
        norm_num_groups=2,
        use_additional_conditions=False,
    ),
    "Stable Diffusion 3": diffused(
        "SD3Transformer2DModel",
        drawn(4, 8, 8, **SPATIAL, encoder_hidden_states=(6, 16), pooled_projections=(16,)),
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ),
    "Flux": diffused(
        "FluxTransformer2DModel",
        placed,
        rules={"img_ids": None, "txt_ids": None},
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    ),
    "timm ViT": of_timm("test_vit", img_size=64),
    "timm ConvNeXt": of_timm("test_convnext"),
    "timm EfficientNet": of_timm("test_efficientnet"),
    "timm ResNet": of_timm("test_resnet", boundaries={"layer3": "before"}),
    "timm NFNet": of_timm("test_nfnet", boundaries={"stages.2": "before"}),
    "timm MaxViT": of_timm("test_maxvit", img_size=64),
    "timm Swin": of_timm(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
    ),
    "timm MLP-Mixer": of_timm("MlpMixer", img_size=64, patch_size=16, embed_dim=16, num_blocks=4),
    "open_clip CLIP": Family("open_clip", open_clip, captioned, None, contrast, loss_alone=True),
    "open_clip CoCa": Family("open_clip", coca, captioned, None, contrast_and_caption, loss_alone=True),
}

# --- the table ---


def from_case(case: hf.HFCase) -> Family:
    return Family("transformers", case.model, shortened(case.inputs), case.boundaries)


def from_study(name: str, batch: Any = None) -> Family:
    study = opaque_regions.STUDIES[name]
    rules = {part: rule if isinstance(rule, list) else [rule] for part, rule in study.boundaries.items()}
    cuts = {part: [one for one in rule if one != "whole"] for part, rule in rules.items()}
    cuts = {part: rule for part, rule in cuts.items() if rule}
    return Family("transformers", study.model, counted(batch or study.batch), cuts, None, study.rules)


FAMILIES: dict[str, Family] = {
    **{name: from_case(case) for name, case in {**hf.MODELS, **architectures.MORE}.items()},
    **{
        name: from_study(name)
        for name in ("SmolVLM", "Idefics 3", "Qwen2-VL", "Qwen2.5-VL", "LLaVA", "PaliGemma", "Longformer", "wav2vec2")
    },
    **MORE,
    **OTHERS,
}
