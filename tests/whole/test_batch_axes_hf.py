"""transformers' mixtures, unmodified, with its own expert parallelism inside of stages, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from fxpipe.parameters.dtensors import whole_of
from tests import hf
from tests.harness import Run
from tests.hf import HFCase, layers, predicted_labels, trained_plainly
from tests.models import Inputs
from tests.pool import Pool

MICROBATCHES, ROWS, STEPS = 2, 2, 4
Axes = Sequence[tuple[str, int]]
ADAMW = {"optimizer": torch.optim.AdamW, "optimizer_options": {"lr": 1e-3, "eps": 1e-6}}

EXPERTS = {
    "Qwen3-MoE": HFCase(
        partial(hf.qwen3_moe, layers=2),
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
            plan |= {f"{path}.gate_up_proj": "grouped_gemm", f"{path}.down_proj": "grouped_gemm"}
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
    case, topology = EXPERTS[name], Topology(axes)
    torch.manual_seed(0)
    options = {"parallelize": spread_experts, "microbatches": MICROBATCHES, "boundaries": case.boundaries} | options
    options = {"tracer": "record", "check_capture": False} | options
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


def assert_near(got: Tensor, wanted: Tensor, most: float, what: str) -> None:
    gap = (got.double() - wanted.double()).abs().max().item()
    assert gap <= most, f"{what} is off by {gap:.3g}, more than {most:.3g}"


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


def shifted_within(axes: Axes) -> str:
    """What a context rank is told whose labels the model would shift."""
    fxpipe.init()
    topology, generator = Topology(axes), torch.Generator().manual_seed(0)
    batch = {name: value[:, :8] for name, value in hf.causal(MICROBATCHES, generator).items()}
    part = {name: topology.context_part(value) for name, value in batch.items() if name != "attention_mask"}
    options = {"boundaries": layers("model.layers", 2), "microbatches": MICROBATCHES, "tracer": "record"}
    step = fxpipe.compile(hf.llama(), topology, example_kwargs=part, check_capture=False, **options)
    with pytest.raises(fxpipe.RunError) as error:
        step(**part)
    return str(error.value)


def test_labels_that_a_context_rank_would_shift_are_refused(pool: Pool) -> None:
    for text in pool.run(shifted_within, [("pipe", 2), ("context", 2)]):
        assert "the loss would shift labels within this context rank's positions, whose ends lie elsewhere" in text


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_spread_over_ranks_train_as_in_plain_pytorch(pool: Pool, name: str) -> None:
    axes = [("pipe", 2), ("expert", 2)]
    results = pool.run(trained, name, axes)
    assert_trained(results, plain(name, 2 * ROWS * MICROBATCHES))
