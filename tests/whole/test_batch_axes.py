"""Expert and context axes against plain PyTorch: layers that meet other ranks, and gradients summed by the rule.

A gradient is summed over those batch axes on which its parameter is not sharded. The toy's experts dispatch tokens by
an all-to-all, its attention gathers keys and values; transformers' models are in ``test_batch_axes_hf``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.tensors.dtensors import local, whole_of
from tests.harness import accumulate
from tests.models import Inputs
from tests.pool import Pool

WORDS, WIDTH, EXPERTS, LENGTH, ROWS, MICROBATCHES, STEPS = 11, 8, 4, 8, 2, 2, 4
Axes = Sequence[tuple[str, int]]
ADAMW = {"lr": 1e-3, "eps": 1e-6}


# --- the model, which knows nothing of ranks ---


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        return run_experts(self.up, self.down, tokens, chosen)


def run_experts(up: Tensor, down: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    hidden = torch.tanh(torch.einsum("tw,ewh->teh", tokens, up))
    made = torch.einsum("teh,ehw->tew", hidden, down)
    return made.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, WIDTH)).squeeze(1)


class Attention(nn.Module):
    """Causal attention of the positions that it is given to all positions. ``whole``: gathers keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: Callable[[Tensor], Tensor] = _same

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        k, v = self.whole(k), self.whole(v)
        mask = positions.unsqueeze(-1) >= torch.arange(k.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _same(value: Tensor) -> Tensor:
    return value


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False), Attention()
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(*self.qkv(x).chunk(3, -1), positions)
        tokens = self.norm(x).flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        return x + (self.experts(tokens, chosen) * weight.unsqueeze(-1)).view(x.shape)


class Toy(nn.Module):
    """Two blocks. ``loss``: "sum" for a ``fxpipe.Sum`` over the labels that count; "mean" for their mean."""

    def __init__(self, loss: str = "sum", blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), loss
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(stage_boundary(x) if number else x, positions)
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        count = (labels != -100).sum()
        if self.loss == "sum":
            return fxpipe.Sum(losses.sum(), count)
        return losses.sum() / count  # nan where no label counts


def toy(**options: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(**options)


# --- what a library does with it ---


def spread(stage: nn.Module, mesh: Any) -> None:
    """Spreads experts over the expert axis, and lets attention see the positions of all context ranks."""
    for module in list(stage.modules()) if mesh is not None else ():
        if isinstance(module, Experts) and "expert" in mesh.mesh_dim_names:
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter, mesh["expert"], [Shard(0)])))
            module.forward = dispatching(module, mesh["expert"].get_group())  # type: ignore[method-assign]
        if isinstance(module, Attention) and "context" in mesh.mesh_dim_names:
            module.whole = gathering(mesh)


def sharded(stage: nn.Module, mesh: Any, dense: tuple[str, ...]) -> None:
    """Experts over the expert axis and FSDP2 on data; the rest by FSDP2 over the axes ``dense``, flattened."""
    spread(stage, mesh)
    for module in list(stage.modules()):
        if isinstance(module, Experts):
            fully_shard(module, mesh=mesh["data"])
            module.forward = dispatching(module, mesh["expert"].get_group())  # type: ignore[method-assign]
    fully_shard(stage, mesh=mesh[dense]._flatten() if len(dense) > 1 else mesh[dense[0]])


def dispatching(experts: Experts, group: Any) -> Callable[[Tensor, Tensor], Tensor]:
    ranks = dist.get_world_size(group)

    def forward(tokens: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen * ranks // EXPERTS, minlength=ranks)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=group)
        sizes = came.tolist(), sent.tolist()
        numbers = torch.empty(int(came.sum()), dtype=chosen.dtype)
        dist.all_to_all_single(numbers, chosen[order], *sizes, group=group)
        arrived = all_to_all_single_autograd(tokens[order], *sizes, group)
        up, down = experts.up.to_local(), experts.down.to_local()
        made = run_experts(up, down, arrived, numbers % (EXPERTS // ranks))
        back = all_to_all_single_autograd(made, *reversed(sizes), group)
        return torch.empty_like(tokens).index_copy(0, order, back)

    return forward


def gathering(mesh: Any) -> Callable[[Tensor], Tensor]:
    topology = Topology.from_mesh(mesh)

    def whole(value: Tensor) -> Tensor:
        parts = DTensor.from_local(value, mesh["context"], [Shard(1)])
        gathered = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return topology.context_whole(gathered)

    return whole


# --- batches ---


def batch(step: int, replicas: int, seed: int = 0) -> Inputs:
    """The rows of all replicas; some labels do not count, and as many as it happens in each half of a row."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    ids, labels = torch.randint(0, WORDS, (2, ROWS * MICROBATCHES * replicas, LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"ids": ids, "labels": labels, "positions": torch.arange(LENGTH).expand(len(ids), LENGTH)}


def mine(whole: Inputs, topology: Topology) -> Inputs:
    """The rows and positions of this process."""
    return {n: topology.context_part(v.chunk(topology.data_size)[topology.data_rank]) for n, v in whole.items()}


# --- training, and the same in plain PyTorch ---


def forget_groups() -> None:
    """Empties the caches of DTensor, which name groups of earlier worlds of these processes."""
    _clear_sharding_prop_cache()
    x = torch.ones((), requires_grad=True)
    x.register_hook(lambda _: _clear_sharding_prop_cache())  # of the thread that runs backwards, on a GPU another
    x.backward()


def compiled(
    axes: Axes, model: Mapping[str, Any] = {}, per_node: int | None = None, forgets: bool = True, **options: Any
) -> Any:
    fxpipe.init()
    if forgets:
        forget_groups()
    topology = Topology(axes, per_node)
    example = mine(batch(0, topology.data_size), topology)
    tracer = fxpipe.Tracing(check=False)
    defaults: dict[str, Any] = {"parallelize": spread, "microbatches": MICROBATCHES, "tracer": tracer}
    defaults |= {"tracer": "record", "example_kwargs": example}
    return fxpipe.compile(toy(**model), topology, **defaults | options)


def trained(axes: Axes, calls: int = 1, **options: Any) -> dict[str, Any]:
    """Steps of AdamW, each of several calls. Losses, whole gradients and norms of each step; the state in the end."""
    step = compiled(axes, **options)
    topology = step.topology
    optimizer = step.optimizer(torch.optim.AdamW, **ADAMW)
    run: dict[str, Any] = {"losses": [], "gradients": [], "norms": [], "moved": []}
    for number in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for call in range(calls):
            step.set_requires_gradient_sync(call == calls - 1)
            losses.append(step(**mine(batch(number, topology.data_size, call), topology)))
        run["losses"].append(sum(map(float, losses)))
        run["moved"].append([(row.operation, row.scope, row.group, row.bytes) for row in step.traffic().rows])
        whole = {n: p.grad for n, p in step.named_parameters() if p.grad is not None and not p.grad.is_meta}
        run["gradients"].append({name: whole_of(gradient).clone() for name, gradient in whole.items()})
        norms = {name: float(norm) for name, norm in step.grad_norms().items()}
        run["norms"].append(norms | {"all": float(step.clip_grad_norm_(1e9))})
        optimizer.step()
    run["evaluated"] = float(step.evaluate(**mine(batch(99, topology.data_size), topology), outputs="loss"))
    run["state"] = step.state_dict(full=True)
    step.close()
    return run


def plain(replicas: int, calls: int = 1, model: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The loop over the micro-batches of all replicas."""
    module = toy(**model)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    run: dict[str, Any] = {"losses": [], "gradients": []}
    for number in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for call in range(calls):
            whole = batch(number, replicas, call)
            parts = [{n: v.split(ROWS)[place] for n, v in whole.items()} for place in range(MICROBATCHES * replicas)]
            losses.append(float(accumulate(lambda _, part: module(**part), parts)[0]))
        run["losses"].append(sum(losses))
        run["gradients"].append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    with torch.no_grad():
        total = module.eval()(**batch(99, replicas))
    run["evaluated"] = float(total.total / total.count) if isinstance(total, fxpipe.Sum) else float(total)
    run["state"] = module.state_dict()
    return run


def assert_near(got: Tensor, wanted: Tensor, most: float, what: str) -> None:
    gap = (got.double() - wanted.double()).abs().max().item()
    assert gap <= most, f"{what} is off by {gap:.3g}, more than {most:.3g}"


def assert_trained(runs: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any], gradients: bool = True) -> None:
    """Loss and norms within 1e-6, gradients within 2e-6 of a parameter's largest, parameters within 5e-6."""
    seen = set()
    for run in runs:
        assert run["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert run["evaluated"] == pytest.approx(wanted["evaluated"], rel=2e-6)
        for step, whole in enumerate(wanted["gradients"]):
            for name, gradient in run["gradients"][step].items():
                assert_near(gradient, whole[name], 2e-6 * float(whole[name].abs().max()), f"step {step}: {name}")
            seen |= run["gradients"][step].keys()
            norms = {name: float(gradient.double().norm()) for name, gradient in whole.items()}
            norms["all"] = sum(norm**2 for norm in norms.values()) ** 0.5
            assert run["norms"][step] == pytest.approx(norms, rel=1e-6, abs=1e-9)
        assert run["state"].keys() == wanted["state"].keys()
        for name, tensor in wanted["state"].items():
            assert_near(run["state"][name], tensor, 5e-6, name)
    assert seen == wanted["gradients"][0].keys() or not gradients


# --- the rule ---

PIPE_EXPERT = [("pipe", 2), ("expert", 2)]


@pytest.mark.parametrize(
    "axes",
    [
        PIPE_EXPERT,
        [("expert", 4)],
        [("data", 2), ("expert", 2)],
        [("pipe", 2), ("context", 2)],
        [("context", 2), ("expert", 2)],
    ],
    ids=lambda axes: "-".join(f"{name}{size}" for name, size in axes),
)
def test_ranks_train_as_plain_pytorch_does(pool: Pool, axes: Axes) -> None:
    runs = pool.run(trained, axes)
    assert_trained(runs, plain(Topology(axes).size("data") * Topology(axes).size("expert")))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ([("pipe", 2), ("data", 2), ("expert", 2)], {"zero": 1, "per_node": 4}),
        ([("pipe", 2), ("expert", 4)], {}),
        ([("pipe", 2), ("data", 2), ("context", 2)], {"zero": 2}),
    ],
    ids=str,
)
def test_eight_ranks_train_as_plain_pytorch_does(pool: Pool, axes: Axes, options: dict[str, Any]) -> None:
    runs = pool.run(partial(trained, axes, **options), ranks=8)
    replicas = Topology(axes).size("data") * Topology(axes).size("expert")
    assert_trained(runs, plain(replicas), gradients=not options)


def words(ids: Tensor, labels: Tensor, positions: Tensor) -> int:
    """A cost by which ranks alone would order micro-batches differently, also those that share rows."""
    return int(ids.sum())


@pytest.mark.parametrize(
    ("axes", "calls", "options"),
    [
        (PIPE_EXPERT, 2, {"recompute": True, "schedule": "gpipe"}),
        (PIPE_EXPERT, 1, {"schedule": "interleaved_1f1b", "model": {"blocks": 4}}),
        (PIPE_EXPERT, 1, {"microbatch_cost": words}),
        ([("pipe", 2), ("context", 2)], 1, {"microbatch_cost": words}),
    ],
    ids=["accumulated-recomputed", "interleaved", "ordered", "ordered in a context"],
)
def test_schedules_recomputation_and_accumulation_change_nothing(
    pool: Pool, axes: Axes, calls: int, options: dict[str, Any]
) -> None:
    runs = pool.run(partial(trained, axes, calls, **options))
    assert_trained(runs, plain(Topology(axes).size("expert"), calls, options.get("model", {})))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (PIPE_EXPERT, {"zero": 1}),
        ([("data", 2), ("expert", 2)], {"zero": 2, "per_node": 2}),  # expert groups inside of a node
        ([("expert", 2), ("data", 2)], {"zero": 1, "per_node": 2}),  # and across nodes
        ([("context", 2), ("expert", 2)], {"zero": fxpipe.Zero(2, scope="data"), "per_node": 2}),
    ],
    ids=str,
)
def test_dense_parameters_are_sharded_beside_experts(pool: Pool, axes: Axes, options: dict[str, Any]) -> None:
    runs = pool.run(partial(trained, axes, **options))
    topology = Topology(axes)
    assert_trained(runs, plain(topology.size("data") * topology.size("expert")), gradients=False)
    assert all(".experts." in name for run in runs for name in run["gradients"][0])  # .grad of others is a mark


@pytest.mark.parametrize("dense", [("data",), ("data", "expert")], ids=str)
def test_fsdp2_on_data_shards_experts_too(pool: Pool, dense: tuple[str, ...]) -> None:
    axes = [("pipe", 1), ("data", 2), ("expert", 2)]
    runs = pool.run(partial(trained, axes, parallelize=partial(sharded, dense=dense)))
    assert_trained(runs, plain(4))


def test_an_experts_gradient_travels_over_the_data_axis_alone(pool: Pool) -> None:
    runs = pool.run(trained, [("pipe", 1), ("data", 2), ("expert", 2)])
    experts = 2 * 2 * EXPERTS // 2 * WIDTH * WIDTH * 4  # of two blocks two parameters, half of the experts, float32
    dense = 4 * sum(p.numel() for name, p in toy().named_parameters() if "experts" not in name)
    for rank, run in enumerate(runs):
        group = (rank % 2, rank % 2 + 2)
        # A ring of two ranks sends as many bytes as there are, a ring of four half as much again.
        assert ("all_reduce", "data alone", group, experts) in run["moved"][-1]
        (shared,) = (size for op, scope, _, size in run["moved"][-1] if (op, scope) == ("all_reduce", "shard"))
        assert dense <= shared / 1.5 <= dense + 64 * 20
    assert_trained(runs, plain(4))


def joined(axes: Axes, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """A step of a model whose second stage sees the rows of all replicas."""
    fxpipe.init()
    topology = Topology(axes)
    torch.manual_seed(0)
    example = mine(batch(0, topology.data_size), topology)
    step = fxpipe.compile(Joined(), topology, microbatches=MICROBATCHES, example_kwargs=example, **options)
    loss = float(step(**example))
    gradients = {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}
    step.close()
    return loss, gradients


def test_an_expert_axis_on_which_nothing_is_sharded_is_data(pool: Pool) -> None:
    axes = [("pipe", 1), ("data", 2), ("expert", 2)]
    runs = pool.run(partial(trained, axes, zero=3, parallelize=None))
    assert_trained(runs, plain(4), gradients=False)
    wanted = pool.run(joined, [("pipe", 2), ("data", 2)], {"schedule": "gpipe"})
    for (loss, gradients), (expected, whole) in zip(
        pool.run(joined, PIPE_EXPERT, {"schedule": "gpipe"}), wanted, strict=True
    ):
        assert loss == expected
        assert all(torch.equal(gradient, whole[name]) for name, gradient in gradients.items())


# --- checkpoints ---


def continued(axes: Axes, folder: str, first: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """The state after four steps on two replicas' rows. From step ``first`` on, after which a checkpoint is read, or
    else with a checkpoint written in the middle."""
    step = compiled(axes, **options)
    topology = step.topology
    optimizer = step.optimizer(torch.optim.AdamW, **ADAMW)
    if first:
        assert fxpipe.load(folder, step, optimizer)["step"] == first
    for number in range(first, STEPS):
        optimizer.zero_grad()
        whole = batch(number, 2)
        parts = MICROBATCHES * 2 // topology.data_size  # of two rows each
        calls = [
            {name: value.split(ROWS)[topology.data_rank * parts + n] for name, value in whole.items()}
            for n in range(parts)
        ]
        step.step_microbatches([((), call) for call in calls])
        optimizer.step()
        if not first and number == 1:
            fxpipe.save(folder, step, optimizer, step=2)
    state = step.state_dict(full=True)
    step.close()
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("zero", [0, 1])
def test_a_checkpoint_loads_onto_any_other_expert_size(pool: Pool, tmp_path: Path, zero: int) -> None:
    options = {"zero": zero, "schedule": "gpipe"}
    (saved, *_) = pool.run(continued, PIPE_EXPERT, str(tmp_path), 0, options)
    wanted = plain(2)["state"]
    for name, tensor in wanted.items():
        assert_near(saved[name], tensor, 5e-6, name)
    for axes in (PIPE_EXPERT, [("expert", 4)], [("pipe", 2), ("data", 2)], [("data", 2), ("expert", 2)]):
        for state in pool.run(continued, axes, str(tmp_path), 2, options):
            for name, tensor in saved.items():
                assert_near(state[name], tensor, 0.0 if axes == PIPE_EXPERT else 5e-6, name)


# --- the start ---


class Most:
    """An ``init_fn`` that notes how many numbers of whole experts it has seen at once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.numbers = model, 0

    def __call__(self, module: nn.Module) -> None:
        parameters = [p for name, p in self.model.named_parameters() if ".experts." in name and not p.is_meta]
        self.numbers = max(self.numbers, sum(p.numel() for p in parameters))
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.1)


def started(axes: Axes, parallelize: Any, weights: str = "") -> tuple[dict[str, Tensor], int, int]:
    """The state of a model that starts on the meta device; the most numbers of experts seen at once; and those held."""
    fxpipe.init()
    forget_groups()
    topology = Topology(axes)
    with torch.device("meta"):
        model = Toy()
    most = Most(model)
    example = mine(batch(0, topology.data_size), topology)
    step = fxpipe.compile(
        model,
        topology,
        init_fn=None if weights else most,
        checkpoint=weights or None,
        parallelize=parallelize,
        tracer="record",
        microbatches=MICROBATCHES,
        example_kwargs=example,
    )
    step(**example)
    held = sum(local(p).untyped_storage().nbytes() for name, p in step.named_parameters() if ".experts." in name) // 4
    state = {name: tensor.clone() for name, tensor in step.state_dict(full=True).items()}
    step.close()
    return state, most.numbers, held


@pytest.mark.parametrize("way", ["init_fn", "checkpoint", "FSDP2"])
def test_a_rank_never_holds_all_experts(pool: Pool, tmp_path: Path, way: str) -> None:
    weights = str(tmp_path / "model.pt") if way == "checkpoint" else ""
    if weights:
        torch.save(toy().state_dict(), weights)
    axes = [("pipe", 1), ("data", 2), ("expert", 2)] if way == "FSDP2" else PIPE_EXPERT
    parallelize = partial(sharded, dense=("data", "expert")) if way == "FSDP2" else spread
    (wanted, _, _), *_ = pool.run(started, [("pipe", 2), ("data", 2)], None, weights)
    one = EXPERTS * WIDTH * WIDTH
    for state, most, held in pool.run(started, axes, parallelize, weights):
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(state[name], tensor), name
        assert most <= one  # a single parameter, whole
        assert held == (one if way != "FSDP2" else 4 * one // 4)  # two of a block, or four of both; half, or a quarter


# --- lockstep: ranks that meet inside of stages run the same actions ---


def weight(ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    return (labels != -100).sum()


def without_weight(axes: Axes, options: dict[str, Any]) -> dict[str, Any]:
    """A step in which the second micro-batch of the last replica has no label, and its loss is nan."""
    step = compiled(axes, model={"loss": "mean"}, loss_weight=weight, **options)
    topology = step.topology
    loss = step(**mine(hollow(topology.data_size), topology))
    whole = {name: whole_of(p.grad).clone() for name, p in step.named_parameters()}
    step.close()
    return {"loss": float(loss), "gradients": whole}


def hollow(replicas: int) -> Inputs:
    whole = batch(0, replicas)
    whole["labels"][-ROWS:] = -100
    return whole


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_a_micro_batch_without_weight_on_one_expert_rank_adds_nothing(pool: Pool, options: dict[str, Any]) -> None:
    runs = pool.run(without_weight, PIPE_EXPERT, options)
    module = toy(loss="mean")
    whole = hollow(2)
    parts = [{name: value.split(ROWS)[place] for name, value in whole.items()} for place in range(2 * MICROBATCHES)]
    loss, _ = accumulate(lambda _, part: module(**part), parts, [float(weight(**part)) for part in parts])
    assert [run["loss"] for run in runs] == pytest.approx([float(loss)] * 4, rel=1e-6)
    for run in runs:
        for name, gradient in run["gradients"].items():
            wanted = module.get_parameter(name).grad
            assert wanted is not None
            assert_near(gradient, wanted, 2e-6 * float(wanted.abs().max()), name)


def of_other_lengths(axes: Axes) -> dict[str, Any]:
    """Each replica has rows of its own length; then one of them has other micro-batches."""
    step = compiled(axes)
    topology = step.topology
    whole = mine(batch(0, topology.data_size), topology)
    shorter = {name: value[:, : LENGTH - 2 * topology.data_rank] for name, value in whole.items()}
    loss = step(**shorter)
    gradients = {name: whole_of(p.grad).clone() for name, p in step.named_parameters()}
    calls = [((), {name: value[:1] for name, value in whole.items()})] * (MICROBATCHES + topology.data_rank)
    with pytest.raises(fxpipe.RunError) as refused:
        step.step_microbatches(calls)
    step.close()
    return {"loss": float(loss), "gradients": gradients, "refused": str(refused.value)}


def test_other_lengths_on_one_replica_train_and_other_tables_are_refused(pool: Pool) -> None:
    runs = pool.run(of_other_lengths, PIPE_EXPERT)
    module, whole = toy(), batch(0, 2)
    parts = []
    for place in range(2 * MICROBATCHES):
        length = LENGTH - 2 * (place // MICROBATCHES)
        parts.append({name: value.split(ROWS)[place][:, :length] for name, value in whole.items()})
    loss, _ = accumulate(lambda _, part: module(**part), parts)
    for run in runs:
        assert run["loss"] == pytest.approx(float(loss), rel=1e-6)
        for name, gradient in run["gradients"].items():
            wanted = module.get_parameter(name).grad
            assert wanted is not None
            assert_near(gradient, wanted, 2e-6 * float(wanted.abs().max()), name)
        assert "sums and gathers inside of a step run in the order of the table" in run["refused"]


# --- refused ---


def replicated(stage: nn.Module, mesh: Any) -> None:
    for path, module in list(stage.named_modules()):
        if path.endswith("norm"):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh["expert"], [Replicate()]))


class Normed(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.BatchNorm1d(WIDTH)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        x = stage_boundary(self.normed(self.embed(ids).flatten(0, 1)))
        return self.head(x).square().mean()


class Joined(Toy):
    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        return self.head(stage_boundary(self.embed(ids), gather="global")).square().mean()


REFUSED: dict[str, tuple[Axes, Callable[[], nn.Module], Any, str]] = {
    "a replicated DTensor": (
        PIPE_EXPERT,
        toy,
        replicated,
        "with Replicate() over the expert axis, so that nothing sums",
    ),
    "no tensor part": (
        [("expert", 2), ("tensor", 2)],
        toy,
        spread,
        "over the expert axis and not over the tensor axis, whose ranks may run it on tokens of their own",
    ),
    "batch statistics": (
        [("pipe", 2), ("context", 2)],
        Normed,
        None,
        "normed is a BatchNorm1d, and its statistics on a context axis would be those of this rank's positions alone",
    ),
    "attention to own positions": (
        [("pipe", 2), ("context", 2)],
        toy,
        None,
        "attention sees the positions of this rank alone; pass",
    ),
    "joined rows": ([("pipe", 2), ("context", 2)], Joined, None, "but context ranks have other positions of the same"),
}


def refused(case: str) -> str:
    axes, model, parallelize, _ = REFUSED[case]
    fxpipe.init()
    forget_groups()
    topology = Topology(axes)
    example = mine(batch(0, topology.data_size), topology)
    with pytest.raises(fxpipe.FxpipeError) as error:
        fxpipe.compile(model(), topology, example_kwargs=example, tracer="record", parallelize=parallelize)
    return str(error.value)


@pytest.mark.parametrize("case", REFUSED)
def test_a_sum_that_would_be_wrong_is_refused(pool: Pool, case: str) -> None:
    for text in pool.run(refused, case):
        assert REFUSED[case][-1] in text


class Convolved(Toy):
    """As Mamba begins: a causal convolution along positions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        x = self.convolution(self.embed(ids).transpose(1, 2))[..., : ids.shape[1]]
        return self.head(x.transpose(1, 2)).square().mean()


class Counted(Toy):
    """As nanoGPT begins: positions that forward counts."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.blocks[0](x, positions)).square().mean()


class Sliced(Toy):
    """As torchtitan's Llama has its rotary frequencies: a table of all positions, of which forward takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.outer(torch.arange(2.0 * LENGTH), torch.ones(WIDTH)), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        x = self.embed(ids) + self.angles[0 : ids.shape[1]].sin()
        return self.head(self.blocks[0](x, positions)).square().mean()


OWN_POSITIONS: dict[str, tuple[type[Toy], str]] = {
    "convolved": (Convolved, "has a convolution along positions that pads the ends of this context rank's part"),
    "sliced": (Sliced, "takes the first rows of angles as of a table of positions, such as freqs_cis[:length]"),
    "counted": (Counted, "looks up an embedding of positions that it counts itself (torch.arange)"),
}


class InParts(Toy):
    """As fairseq's attention: a part of a weight, of as many rows as a rank has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.ones(LENGTH, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        x = self.blocks[0](self.embed(ids), positions)
        return nn.functional.linear(x, self.both[: LENGTH // 2]).square().mean()


def on_context_ranks(model: type[Toy]) -> Any:
    fxpipe.init()
    topology = Topology([("context", 2)])
    example = mine(batch(0, 1), topology)
    options = {"microbatches": 1, "tracer": "record", "parallelize": spread}
    return fxpipe.compile(model(), topology, example_kwargs=example, **options)(**example)


def of_own_positions(case: str) -> str:
    with pytest.raises(fxpipe.FxpipeError) as error:
        on_context_ranks(OWN_POSITIONS[case][0])
    return str(error.value)


def test_a_part_of_a_weight_is_no_table_of_positions(pool: Pool) -> None:
    assert all(loss > 0 for loss in pool.run(on_context_ranks, InParts, ranks=2))


@pytest.mark.parametrize("case", OWN_POSITIONS)
def test_what_takes_a_context_ranks_positions_for_all_is_refused(pool: Pool, case: str) -> None:
    for text in pool.run(of_own_positions, case, ranks=2):
        assert OWN_POSITIONS[case][1] in text


def clipped_by_torch(axes: Axes) -> str:
    step = compiled(axes)
    step(**mine(batch(0, step.topology.data_size), step.topology))
    with pytest.raises(fxpipe.RunError) as error:
        nn.utils.clip_grad_norm_(step.parameters(), 1.0)
    return str(error.value)


def test_a_norm_of_plain_gradients_and_experts_names_the_call_that_takes_it(pool: Pool) -> None:
    for text in pool.run(clipped_by_torch, [("expert", 2)], ranks=2):
        assert "forward_backward.clip_grad_norm_(max_norm) clips by the whole model's norm" in text


def stepped_by_norms(axes: Axes) -> str:
    """What a step of Adafactor says, which reads the norm of each parameter."""
    step = compiled(axes)
    optimizer = step.optimizer(torch.optim.Adafactor)
    step(**mine(batch(0, step.topology.data_size), step.topology))
    with pytest.raises(fxpipe.RunError) as error:
        optimizer.step()
    return str(error.value)


def test_an_optimizer_that_would_step_experts_by_the_norm_of_a_part_is_refused(pool: Pool) -> None:
    for text in pool.run(stepped_by_norms, [("expert", 2)], ranks=2):
        assert "Adafactor steps by a number computed from a whole parameter, such as its norm" in text


def with_other_rows(axes: Axes) -> str:
    step = compiled(axes)
    topology = step.topology
    for number in range(2):
        wrong = mine(batch(number, 1, seed=dist.get_rank() % 2), topology)
        if number == 0:
            step(**wrong)
            continue
        with pytest.raises(fxpipe.RunError) as error:
            step(**wrong)
    return str(error.value)


def test_context_ranks_that_draw_other_rows_are_refused(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(with_other_rows, [("pipe", 2), ("context", 2)])):
        first = rank - rank % 2
        assert f"the ranks [{first}, {first + 1}] of a context group were given different batches" in text
        assert f"'tensor 0 of context_part' of ranks [{first}] and [{first + 1}]" in text


# --- a preview ---


def previewed(axes: Axes, parallelize: Any, **options: Any) -> fxpipe.Preview:
    topology = Topology(axes)
    example = {name: value[: ROWS * MICROBATCHES] for name, value in batch(0, 1).items()}
    options |= {"microbatches": MICROBATCHES, "tracer": "record", "example_kwargs": example}
    return fxpipe.preview(toy(), topology, parallelize=parallelize, **options)


def bytes_in_a_run(axes: Axes) -> tuple[int, int, int]:
    """What this rank holds of parameters, gradients and the optimizer's state, in a process that made a preview."""
    forget_groups()
    previewed(axes, spread_over_data)
    step = compiled(axes, forgets=False, parallelize=spread_over_data)
    optimizer = step.optimizer(torch.optim.AdamW, **ADAMW)
    step(**mine(batch(0, step.topology.data_size), step.topology))
    named = [each for _, each in step.named_parameters()]
    gradients = sum(local(each.grad).nbytes for each in named)
    optimizer.step()
    states = [state for group in optimizer.state.values() for state in group.values() if isinstance(state, Tensor)]
    size = sum(local(state).nbytes for state in states if state.ndim)
    step.close()
    return sum(local(each).nbytes for each in named), gradients, size


def spread_over_data(stage: nn.Module, mesh: Any) -> None:
    """The second block's experts are sharded over data, too, by FSDP2."""
    spread(stage, mesh)
    for path, module in list(stage.named_modules()):
        if isinstance(module, Experts) and "blocks.1" in path:
            fully_shard(module, mesh=mesh["data"])
            module.forward = dispatching(module, mesh["expert"].get_group())  # type: ignore[method-assign]


def test_a_preview_counts_the_parts_that_parallelize_leaves_on_a_rank(pool: Pool) -> None:
    axes = [("data", 2), ("expert", 2)]
    (rank,) = previewed(axes, spread_over_data).ranks
    for run in pool.run(bytes_in_a_run, axes):
        assert run == (rank.parameters, rank.gradients, rank.optimizer)
    assert rank.whole == 2 * 2 * WIDTH * WIDTH * (EXPERTS // 2) * 4  # values and gradients that FSDP2 gathers


def test_a_preview_sends_tokens_to_experts_and_back() -> None:
    axes, wire = [("pipe", 2), ("expert", 2)], 1e9
    hardware = fxpipe.Hardware(flops=1e12, bandwidth=1e12, link=wire, latency=0.0)
    costs = [previewed(axes, each, hardware=hardware).timeline.costs for each in (spread, lambda *_: None)]
    half = ROWS * LENGTH * WIDTH * 4 / 2 / wire  # the bytes of a micro-batch's tokens that go to the other rank
    for stage in range(2):
        assert costs[0].forward[stage] - costs[1].forward[stage] == pytest.approx(2 * half)
        assert costs[0].backward[stage] - costs[1].backward[stage] == pytest.approx(2 * half)
