"""Hugging Face models on the meta device: their checkpoints, their own rules of initialisation, and a run of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.parameters.materialise import init_weights_of, materialise
from fxpipe.parameters.weights import Weights
from tests.pool import Pool
from tests.thinned import ALL, every

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

HERE = torch.get_default_device()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 11}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=11))


_TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def clip() -> nn.Module:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=8))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=10,
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_name(saved: str) -> str:
    """LLaVA is saved under the names of an earlier release."""
    if saved.startswith("language_model.model."):
        return saved.replace("language_model.model.", "model.language_model.", 1)
    return "lm_head.weight" if saved == "language_model.lm_head.weight" else f"model.{saved}"


RENAMED = {llava: llava_name}
HUGGING_FACE = {"llama": llama, "gpt2": gpt2, "clip": clip, "t5": t5, "llava": llava}


@pytest.mark.parametrize("build", HUGGING_FACE.values(), ids=HUGGING_FACE)
def test_a_hugging_face_checkpoint_makes_the_model_that_was_saved(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    original, model = build(), on_meta(build)
    original.save_pretrained(tmp_path)
    weights = Weights.open(tmp_path, rename=RENAMED.get(build))
    materialise(model, set(all_tensors(model)), HERE, init_weights_of(model), weights)
    expected = all_tensors(original)
    for name, tensor in all_tensors(model).items():  # with buffers that no checkpoint holds
        assert torch.equal(tensor, expected[name]), name


def hugging_face_init(model: nn.Module) -> Callable[[nn.Module], None]:
    """CLIP's own rules leave out its temperature, which its constructor sets."""
    own = init_weights_of(model)

    def init_fn(module: nn.Module) -> None:
        own(module)
        if hasattr(module, "logit_scale"):
            nn.init.constant_(module.logit_scale, module.config.logit_scale_init_value)

    return init_fn


@pytest.mark.parametrize("build", HUGGING_FACE.values(), ids=HUGGING_FACE)
def test_hugging_face_models_initialise_themselves_alike_and_in_parts(build: Callable[[], nn.Module]) -> None:
    original, model, parts = build(), on_meta(build), on_meta(build)
    materialise(model, set(all_tensors(model)), HERE, hugging_face_init(model))
    expected = all_tensors(original)
    for name, tensor in all_tensors(model).items():
        deviation = expected[name].double().std(correction=0).item()
        if name in dict(original.named_buffers()) or deviation == 0:
            assert torch.equal(tensor, expected[name]), name
        else:
            assert tensor.std().item() == pytest.approx(deviation, rel=0.5), name
    names = list(all_tensors(parts))
    half = set(names[: len(names) // 2])
    for part in (half, set(all_tensors(parts)) - half):
        materialise(parts, part, HERE, hugging_face_init(parts))
    assert all(torch.equal(tensor, all_tensors(model)[name]) for name, tensor in all_tensors(parts).items())


def test_what_hugging_face_leaves_out_is_named() -> None:
    model = on_meta(clip)
    with pytest.raises(RunError, match=r"init_fn has not written logit_scale .* called on the CLIPModel ''"):
        materialise(model, set(all_tensors(model)), HERE, model._init_weights)


def deep_llama() -> nn.Module:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**_TEXT, "num_hidden_layers": 4}, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config).train()


RANKS = 4 if ALL else 2
"""Each captures the whole model, two of its four stages may lie on one."""
Trained = tuple[list[float], dict[str, Tensor], int]


def train(source: str) -> Trained:
    """Two steps of a Llama on the pipe ranks; ``source``: a checkpoint, "init_fn", or "real" for no meta device at all.

    The losses, the trained model, and how many of the model's tensors this rank has memory for.
    """
    model = deep_llama() if source == "real" else on_meta(deep_llama)
    torch.manual_seed(9)
    tokens = {"input_ids": torch.randint(0, 10, (8, 6)), "labels": torch.randint(0, 10, (8, 6))}
    forward_backward = fxpipe.compile(
        model,
        fxpipe.Topology([("pipe", RANKS)]),
        boundaries={"model.layers.*": {"every": 1}},
        tracer="auto" if ALL else "record",  # torch.export takes several times as long
        microbatches=4,
        example_kwargs=tokens,
        init_fn=None if source == "real" else model._init_weights,
        checkpoint=None if source in ("real", "init_fn") else source,
    )
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(forward_backward(**tokens).item())
        optimizer.step()
    real = sum(not tensor.is_meta for tensor in all_tensors(model).values())
    return losses, forward_backward.state_dict(full=True), real


def assert_trained_alike(first: Trained, other: Trained) -> None:
    assert first[0] == other[0]
    assert first[1].keys() == other[1].keys()
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in first[1].items())


@pytest.mark.parametrize("ranks", every(2, [RANKS, 1]))
def test_a_model_on_meta_trains_as_one_that_was_loaded(ranks: int, tmp_path: Path, pool: Pool) -> None:
    deep_llama().save_pretrained(tmp_path)
    if ranks == 1:
        assert_trained_alike(train(str(tmp_path)), train("real"))
        return
    from_disk, real = pool.run(train, str(tmp_path), ranks=ranks), pool.run(train, "real", ranks=ranks)
    for mine, expected in zip(from_disk, real, strict=True):
        assert_trained_alike(mine, expected)
    assert all(mine[2] < len(all_tensors(deep_llama())) for mine in from_disk)


def test_init_fn_makes_the_same_model_on_one_rank_and_on_several(pool: Pool) -> None:
    alone = train("init_fn")
    for mine in pool.run(train, "init_fn", ranks=RANKS):
        assert mine[0] == pytest.approx(alone[0], rel=1e-6)  # a tied parameter's gradient is summed in another order
        assert all(torch.allclose(tensor, alone[1][name], atol=1e-6) for name, tensor in mine[1].items())
