"""transformers' mixtures, unmodified, with its own expert parallelism inside of stages, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from fxpipe.tensors.dtensors import whole_of
from tests import hf
from tests.device import DEVICE
from tests.harness import Run
from tests.hf import HFCase, layers, predicted_labels, trained_plainly
from tests.models import Inputs
from tests.pool import Pool
from tests.whole.test_batch_axes import assert_near, forget_groups, gathering

MICROBATCHES, ROWS, STEPS = 2, 2, 4
Axes = Sequence[tuple[str, int]]
ADAMW = {"optimizer": torch.optim.AdamW, "optimizer_options": {"lr": 1e-3, "eps": 1e-6}}
PRODUCT = "grouped_mm" if DEVICE == "cpu" else "eager"  # the first takes bfloat16 alone on a GPU

EXPERTS = {
    "Qwen3-MoE": HFCase(
        partial(hf.qwen3_moe, PRODUCT, layers=2),
        hf.causal,
        boundaries=layers("model.layers", 1),
        items=predicted_labels,
        auxiliary=hf.ROUTER,
        **ADAMW,
    ),
    "Mixtral": HFCase(
        partial(hf.mixtral, PRODUCT, layers=2),
        hf.causal,
        boundaries=layers("model.layers", 1),
        items=predicted_labels,
        auxiliary=hf.ROUTER,
        **ADAMW,
    ),
    "DeepSeek-V3": HFCase(
        partial(hf.deepseek_v3, PRODUCT),
        hf.causal,
        boundaries=layers("model.layers", 1),
        items=predicted_labels,
        **ADAMW,
    ),
    "GPT-OSS": HFCase(
        partial(hf.gpt_oss, PRODUCT),
        hf.causal,
        boundaries=layers("model.layers", 1),
        items=predicted_labels,
        auxiliary=hf.ROUTER,
        **ADAMW,
    ),
}


def spread_experts(stage: nn.Module, mesh: Any) -> None:
    """transformers' own expert parallelism, of each module of experts in a stage."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = {}
    for path, module in stage.named_modules():
        if type(module).__name__.endswith("Experts"):
            plan |= {f"{path}.{name}": "grouped_gemm" for name, _ in module.named_parameters()}
            plan[path] = "ep_dispatch_experts"
    apply_expert_parallelism(stage, mesh["expert"], mesh["tensor"], plan)


def batches_of(case: HFCase, rows: int) -> list[Inputs]:
    generator = torch.Generator().manual_seed(0)
    return [case.inputs(rows, generator) for _ in range(STEPS)]


def rows_of_rank(batch: Inputs, topology: Topology) -> Inputs:
    """The rows of this process: every replica has a part of all."""
    return {name: value.chunk(topology.data_size)[topology.data_rank] for name, value in batch.items()}


def compiled(name: str, axes: Axes, **options: Any) -> fxpipe.ForwardBackward:
    fxpipe.init()
    forget_groups()
    case, topology = EXPERTS[name], Topology(axes)
    torch.manual_seed(0)
    options = {"parallelize": spread_experts, "microbatches": MICROBATCHES, "boundaries": case.boundaries} | options
    options = {"tracer": fxpipe.Tracing("record", check=False)} | options
    example = case.inputs(ROWS * MICROBATCHES, torch.Generator().manual_seed(1))
    return fxpipe.compile(case.model(), topology, example_kwargs=example, **options)


def trained(name: str, axes: Axes, **options: Any) -> tuple[Run, list[dict[str, float]], list[Any]]:
    """What a rank comes to: losses, whole gradients and state; norms by name, and that of all; what it moved."""
    case, forward_backward = EXPERTS[name], compiled(name, axes, **options)
    topology = forward_backward.topology
    optimizer = forward_backward.optimizer(case.optimizer, **case.optimizer_options)
    run, norms = Run(), []
    for batch in batches_of(case, ROWS * MICROBATCHES * topology.data_size):
        optimizer.zero_grad()
        run.losses.append(forward_backward(**rows_of_rank(batch, topology)))
        run.gradients.append(
            {n: whole_of(p.grad).clone() for n, p in forward_backward.named_parameters() if p.grad is not None}
        )
        norms.append({name: float(norm) for name, norm in forward_backward.grad_norms().items()})
        norms[-1]["all"] = float(forward_backward.clip_grad_norm_(1e9))
        moved = [(row.operation, row.scope, row.group, row.bytes) for row in forward_backward.traffic().rows]
        optimizer.step()
    run.state = forward_backward.state_dict(full=True)
    forward_backward.close()
    return run, norms, moved


def plain(name: str, rows: int) -> Run:
    """The loop over all replicas' micro-batches."""
    torch.manual_seed(0)
    case = EXPERTS[name]
    return trained_plainly(HFCase(**{**vars(case), "microbatches": rows // ROWS}), batches_of(case, rows))


def assert_trained(results: Sequence[Any], wanted: Run) -> None:
    seen = set()
    for run, norms, _ in results:
        for step, (loss, gradients) in enumerate(zip(run.losses, run.gradients, strict=True)):
            assert_near(loss, wanted.losses[step], 1e-6 * abs(float(wanted.losses[step])), f"the loss of step {step}")
            whole = {name: g for name, g in wanted.gradients[step].items() if g is not None}
            for name, gradient in gradients.items():
                assert_near(gradient, whole[name], 2e-6 * float(whole[name].abs().max()), f"step {step}: {name}")
            seen |= gradients.keys()
            expected = {name: float(gradient.double().norm()) for name, gradient in whole.items()}
            total = sum(norm**2 for norm in expected.values()) ** 0.5
            assert norms[step] == pytest.approx(expected | {"all": total}, rel=1e-6, abs=1e-9)
        for name, tensor in wanted.state.items():
            assert_near(run.state[name], tensor, 5e-6, name)
    assert seen == wanted.gradients[0].keys()


# --- a context axis, with an attention function of one's own ---


def attend_to_all(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention to the positions of all context ranks, as one registers it with transformers."""
    whole, positions = getattr(module, "whole", lambda value: value), options["position_ids"]
    k, v = (whole(value.repeat_interleave(module.num_key_value_groups, 1).transpose(1, 2)) for value in (k, v))
    seen = positions[:, None, :, None] >= torch.arange(k.shape[1])
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=options["scaling"])
    return out.transpose(1, 2).contiguous(), None


def spread_attention(stage: nn.Module, mesh: Any) -> None:
    for module in stage.modules():
        if type(module).__name__ == "LlamaAttention":
            module.whole = gathering(mesh)


def llama(use_cache: bool = False) -> nn.Module:
    transformers.AttentionInterface.register("context", attend_to_all)
    torch.manual_seed(0)
    return hf.llama(attn_implementation="context", use_cache=use_cache)


def sequences(rows: int) -> list[Inputs]:
    found = []
    for batch in batches_of(HFCase(hf.llama, hf.causal), rows):
        ids, labels = batch["input_ids"][:, :8], batch["labels"][:, :8]
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=hf.NONE_LEFT)
        positions = torch.arange(8).expand_as(ids)
        found.append({"input_ids": ids, "labels": labels, "shift_labels": shifted, "position_ids": positions})
    return found


def trained_in_parts(axes: Axes) -> Run:
    fxpipe.init()
    forget_groups()
    topology = Topology(axes)
    parts = [{name: topology.context_part(value) for name, value in batch.items()} for batch in sequences(ROWS * 2)]
    options = {"boundaries": layers("model.layers", 2), "microbatches": MICROBATCHES}
    tracer = fxpipe.Tracing("record", check=False)
    options |= {"example_kwargs": parts[0], "tracer": tracer, "parallelize": spread_attention}
    step = fxpipe.compile(llama(), topology, **options)
    optimizer, run = step.optimizer(torch.optim.AdamW, **ADAMW["optimizer_options"]), Run()
    for part in parts:
        optimizer.zero_grad()
        run.losses.append(step(**part))
        run.gradients.append({n: p.grad.clone() for n, p in step.named_parameters() if p.grad is not None})
        optimizer.step()
    run.state = step.state_dict(full=True)
    step.close()
    return run


def test_llama_on_a_context_axis_trains_as_in_plain_pytorch(pool: Pool) -> None:
    model, wanted = llama(), Run()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW["optimizer_options"])
    for batch in sequences(ROWS * 2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        wanted.losses.append(loss.detach())
        wanted.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    for run in pool.run(trained_in_parts, [("pipe", 2), ("context", 2)]):
        for step, gradients in enumerate(run.gradients):
            assert_near(run.losses[step], wanted.losses[step], 1e-6 * float(wanted.losses[step]), "the loss")
            for name, gradient in gradients.items():
                whole = wanted.gradients[step][name]
                assert whole is not None
                # AdamW's first step divides small gradients by themselves: rounding counts for more from then on.
                most = (5e-6 if step else 1e-6) * float(whole.abs().max())
                assert_near(gradient, whole, most, f"step {step}: {name}")
        for name, tensor in model.state_dict().items():
            assert_near(run.state[name], tensor, 5e-6, name)


def taken_apart(axes: Axes) -> str:
    fxpipe.init()
    topology = Topology(axes)
    part = {name: topology.context_part(value) for name, value in sequences(ROWS)[0].items()}
    options = {"boundaries": layers("model.layers", 2), "microbatches": 1, "tracer": "record"}
    with pytest.raises(fxpipe.FxpipeError) as error:
        fxpipe.compile(llama(True), topology, example_kwargs=part, parallelize=spread_attention, **options)
    return str(error.value)


def test_attention_that_parallelize_cannot_change_is_refused(pool: Pool) -> None:
    for text in pool.run(taken_apart, [("pipe", 2), ("context", 2)]):
        assert "computes attention in code of its own, which sees the positions of this rank alone" in text


LEFT_OUT = {
    "shift_labels": "the loss would shift labels within this context rank's positions, whose ends lie elsewhere",
    "position_ids": "without position_ids the model would count this context rank's positions from 0",
}


def left_out(axes: Axes) -> dict[str, str]:
    """What a context rank is told that gives a call no ``shift_labels``, or no ``position_ids``."""
    fxpipe.init()
    topology, texts = Topology(axes), {}
    part = {name: topology.context_part(value) for name, value in sequences(ROWS)[0].items()}
    tracer = fxpipe.Tracing("record", check=False)
    options = {"boundaries": layers("model.layers", 2), "microbatches": 1, "tracer": tracer}
    for name in LEFT_OUT:
        others = {other: value for other, value in part.items() if other != name}
        # eager attention can do without position_ids, so that the model is captured
        model = hf.llama(attn_implementation="eager", use_cache=False)
        step = fxpipe.compile(model, topology, example_kwargs=others, parallelize=lambda *_: None, **options)
        with pytest.raises(fxpipe.RunError) as error:
            step(**others)
        texts[name] = str(error.value)
    return texts


def test_what_a_model_would_count_within_a_context_ranks_positions_is_refused(pool: Pool) -> None:
    for texts in pool.run(left_out, [("pipe", 2), ("context", 2)]):
        for name, text in LEFT_OUT.items():
            assert text in texts[name]


def unchanged(axes: Axes) -> dict[str, str]:
    """What a context rank is told whose ``parallelize`` leaves attention as it is."""
    fxpipe.init()
    topology, texts = Topology(axes), {}
    part = {name: topology.context_part(value) for name, value in sequences(ROWS)[0].items()}
    options = {"boundaries": layers("model.layers", 2), "microbatches": 1, "tracer": "record", "example_kwargs": part}
    for kind in ("eager", "sdpa"):
        model = hf.llama(attn_implementation=kind, use_cache=False)
        step = fxpipe.compile(model, topology, parallelize=lambda *_: None, **options)
        with pytest.raises(fxpipe.FxpipeError) as error:
            step(**part)
        texts[kind] = str(error.value)
    return texts


def test_attention_that_parallelize_leaves_as_it_is_is_refused(pool: Pool) -> None:
    for texts in pool.run(unchanged, [("context", 2)], ranks=2):
        assert len(texts) == 2
        for text in texts.values():
            assert "has computed attention on this context rank's positions alone" in text


def half_the_heads(stage: nn.Module, mesh: Any) -> None:
    """As tensor parallelism leaves them on a rank."""
    for module in stage.modules():
        if type(module).__name__ == "LlamaAttention":
            projected = module.q_proj.forward
            module.q_proj.forward = lambda x, projected=projected: projected(x).chunk(2, -1)[0]


def test_sizes_that_do_not_fit_what_parallelize_made_are_explained() -> None:
    batch = hf.causal(ROWS, torch.Generator().manual_seed(0))
    options = {"boundaries": layers("model.layers", 2), "microbatches": 1, "parallelize": half_the_heads}
    options |= {"tracer": fxpipe.Tracing("record", check=False), "example_kwargs": batch}
    step = fxpipe.compile(hf.llama(), Topology([("pipe", 2)]), **options)
    with pytest.raises(RuntimeError) as error:
        step(**batch)
    text = "calls only what is inside of model.layers.0.self_attn, by captured code with the sizes and types"
    assert text in "\n".join(error.value.__notes__)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_spread_over_ranks_train_as_in_plain_pytorch(pool: Pool, name: str) -> None:
    axes = [("pipe", 2), ("expert", 2)]
    results = pool.run(trained, name, axes)
    assert_trained(results, plain(name, 2 * ROWS * MICROBATCHES))
