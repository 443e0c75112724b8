"""The record tracer: what it captures computes what plain PyTorch computes, and keeps what a graph could not say."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import TraceError, passes
from fxpipe.batch.description import describe
from fxpipe.graph.modes import Autocast, enter_modes, leave_modes
from fxpipe.graph.program import Program, is_boundary
from fxpipe.passes import split
from fxpipe.passes.chain import chain
from fxpipe.trace import Request, capture
from fxpipe.trace.fake import is_fake
from tests.capturing import run_stages
from tests.device import DEVICE
from tests.thinned import every


def recorded(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Program:
    like = {name: given.like if given.kind == "input" else given.detail for name, given in describe(inputs)}
    return capture(Request(model, tuple(inputs), example=like, **options), "record")


class _Run(fx.Interpreter):
    """Runs an uncut program, in the modes that are noted at its nodes."""

    def __init__(self, program: Program) -> None:
        names = {str(node.target) for node in program.graph.nodes if node.op in ("get_attr", "call_module")}
        graph = fx.GraphModule({name: program.attribute(name) for name in sorted(names)}, program.graph)
        super().__init__(graph, garbage_collect_values=False)
        self._modes: Any = None
        self._entered: Any = None

    def run_node(self, node: fx.Node) -> Any:
        modes = node.meta.get("modes")
        if modes != self._modes and node.op != "get_attr":
            if self._modes is not None:
                leave_modes(self._entered)
            self._modes = modes
            self._entered = None if modes is None else enter_modes(modes.grad, modes.autocast)
        return super().run_node(node)


def replayed(program: Program, inputs: dict[str, Any]) -> Any:
    flat = _Run(program).run(*inputs.values())
    assert program.result is not None
    return pytree.tree_unflatten(flat, program.result)


def staged(program: Program, inputs: dict[str, Any]) -> Any:
    """The same, by way of the passes and the split."""
    graph = split(chain(passes.default(), program))
    assert len(graph.stages) > 1
    return run_stages(graph, inputs)


def loss_of(output: Any) -> Tensor:
    return sum(leaf.float().sum() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def step(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Any], dict[str, Tensor | None], dict[str, Tensor]]:
    """(outputs, gradients, buffers) of one step under a seed of its own."""
    model.zero_grad()
    torch.manual_seed(7)
    output = run()
    loss_of(output).backward()
    return (
        [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(output)],
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check(model: nn.Module, inputs: dict[str, Any], fresh: dict[str, Any] | None = None) -> Program:
    """Captures a model, and compares steps on the traced batch and on another one with plain PyTorch, bit for bit."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = copy.deepcopy(model)
    before = torch.get_rng_state()
    program = recorded(model, inputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(dict(model.state_dict()), state)
    for batch in (inputs, fresh or inputs):
        expected = step(plain, lambda batch=batch: plain(**copy.deepcopy(batch)))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for run in (replayed, staged):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            found = step(model, lambda batch=batch, run=run: run(program, copy.deepcopy(batch)))
            assert_same(found, expected)
    return program


def called(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_module"]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x)).relu_()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.first(x))
        return self.second(h * self.scale.exp()) * 2


def batch(*shape: int, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape, generator=torch.Generator().manual_seed(seed))}


def test_submodules_without_a_boundary_are_opaque() -> None:
    program = check(Residual(), batch(4, 8), batch(4, 8, seed=1))
    assert called(program) == ["first", "second"]
    assert program.effects["first"].writes == (
        "first.norm.running_mean",
        "first.norm.running_var",
        "first.norm.num_batches_tracked",
    )
    assert not program.effects["first"].draws_random
    assert sum(is_boundary(node) for node in program.graph.nodes) == 1
    first = next(node for node in program.graph.nodes if node.name == "first")
    assert first.meta["val"].shape == (4, 8)
    assert "h = fxpipe.stage_boundary(self.first(x))" in first.stack_trace


class ShiftRight(nn.Module):
    """As Hugging Face's ``shift_tokens_right``: writes into views of a tensor that it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1].clone()
        shifted[:, 0] = 2
        shifted.masked_fill_(shifted == 3, 1)
        h = fxpipe.stage_boundary(self.embed(shifted))
        h = h.clone()
        h[..., 0] += 1
        view = h.view(-1, 8)
        view.mul_(0.5)
        return self.head(h)


class Ema(nn.Module):
    """Buffers that are written in place, and set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.inner(x))
        before = self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        self.calls += 1
        return self.head(h - self.mean) + before


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            h = F.linear(x, self.a.weight) @ self.a.weight
            h = fxpipe.stage_boundary(h)
            h = h @ self.b.weight
            with torch.autocast(DEVICE, enabled=False):
                h = self.b(h.float())
            h = self.c(h)
        with torch.no_grad():
            frozen = self.c(x)
        with torch.autocast(DEVICE, torch.bfloat16):
            return self.c(h.float()) + frozen * 2


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.a(x))
        noise = torch.rand(h.shape[0], 1)
        return F.dropout(self.b(h), 0.3, self.training) + noise + torch.randn_like(h)


class Containers(nn.Module):
    """Nested inputs and outputs, None, scalars, keyword-only arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *, batch: dict[str, Any], factor: float = 2.0, extra: Any = None) -> dict[str, Any]:
        h = self.a(batch["x"]) + batch["parts"][1]
        h = fxpipe.stage_boundary({"h": h, "kept": "word"})["h"]
        low, high = self.b(h).chunk(2, -1)
        return {"out": (low * factor, [high.T, None, 3]), "best": high.max(-1), "extra": extra}


@pytest.mark.parametrize(
    ("model", "inputs", "fresh"),
    [
        (ShiftRight, {"x": torch.arange(12).view(3, 4) % 5}, {"x": torch.arange(12).view(3, 4) % 7}),
        (Ema, batch(4, 8), batch(4, 8, seed=1)),
        (Modes, batch(4, 8), batch(4, 8, seed=1)),
        (Dropped, batch(4, 8), batch(4, 8, seed=1)),
        (
            Containers,
            {"batch": {"x": torch.ones(2, 8), "parts": [1, torch.ones(8)]}, "extra": None, "factor": 3.0},
            {"batch": {"x": torch.randn(2, 8), "parts": [1, torch.randn(8)]}, "extra": None, "factor": 3.0},
        ),
    ],
)
def test_gradients_buffers_and_outputs_are_plain_pytorchs(
    model: type[nn.Module], inputs: dict[str, Any], fresh: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    check(model(), inputs, fresh)


class Straight(torch.autograd.Function):
    """Rounds forward, and passes ten times the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x * scale).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 10 + x, None


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(Straight.apply(self.a(x), 3.0))
        return Straight.apply(self.b(h), 2.0)


def test_an_autograd_function_keeps_its_backward() -> None:
    program = check(Rounded(), batch(4, 8), batch(4, 8, seed=1))
    assert list(program.opaque) == ["Straight_0", "Straight_1"]


class Checkpointing(nn.Module):
    """Checkpoints functions: a submodule, a closure over a value, one in a submodule, one inside of another."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((), 2.0))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.a, x.requires_grad_(), **self.options)
        h = fxpipe.stage_boundary(h)
        skip = h * 3

        def inner(h: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(DEVICE, torch.bfloat16):
                y = self.b(h) * self.scale
            return y.float() + (0 if self.options["use_reentrant"] else skip), torch.tanh(y)

        h, y = checkpoint(inner, h, **self.options)
        h = checkpoint(lambda h: checkpoint(self.c, h, **self.options).exp(), h, **self.options)
        return h + y.float()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_functions_stay_checkpointed(reentrant: bool) -> None:
    program = check(Checkpointing(use_reentrant=reentrant), batch(4, 8), batch(4, 8, seed=1))
    assert [name for name in called(program) if name in program.opaque] == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_3",
    ]
    assert program.effects["checkpoint_0"].writes[0] == "a.norm.running_mean"
    assert program.effects["checkpoint_1"].draws_random
    assert program.effects["checkpoint_1"].reads == ("scale", "b.0.weight", "b.0.bias")


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.calls: list[str] = []
        self.b.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.b.inner.register_forward_hook(lambda module, args, output: self.calls.append("forward"))
        self.b.register_full_backward_hook(lambda module, inputs, outputs: self.calls.append("backward"))
        self.b.inner.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(fxpipe.stage_boundary(self.a(x)))


def test_hooks_on_submodules_run_as_often_as_in_the_model() -> None:
    model = Hooked()
    check(model, batch(4, 8), batch(4, 8, seed=1))
    model.calls.clear()
    program = recorded(model, batch(4, 8))
    assert model.calls == []
    loss_of(replayed(program, batch(4, 8))).backward()
    assert model.calls == ["forward", "backward"]


class Branching(nn.Module):
    """Control flow on values, a size that depends on values in between, a write into a buffer, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.seen += 1
        h = self.inner(x) if x.sum() > 0 else self.other(x)
        rows = h[mask.bool().any(-1)] if mask is not None else h
        return h + rows.sum() + torch.rand(()), x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 8), Branching(), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, _ = self.branch(self.first(x), mask)
        return self.last(fxpipe.stage_boundary(h))


def test_control_flow_on_values_inside_a_submodule_is_kept() -> None:
    torch.manual_seed(0)
    inputs = {**batch(4, 8), "mask": torch.tensor([[1, 0], [0, 0], [0, 1], [0, 0]])}
    program = check(Experts(), inputs, {"x": -inputs["x"], "mask": 1 - inputs["mask"]})
    effects = program.effects["branch"]
    assert (effects.writes, effects.draws_random, effects.shares) == (("branch.seen",), True, (0,))


class Collected(nn.Module):
    """Reads what a submodule has put aside, and a parameter of another one."""

    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor, store: list[Tensor] | None = None) -> Tensor:
            h = self.inner(x)
            if store is not None:
                store.append(h)
            return h.relu()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.Keeper(), self.Keeper()

    def forward(self, x: Tensor) -> Tensor:
        store: list[Tensor] = []
        h = fxpipe.stage_boundary(self.a(x, store))
        return self.b(h) @ self.a.inner.weight + store[0]


def test_a_tensor_that_leaves_a_submodule_by_a_side_way_is_followed() -> None:
    program = check(Collected(), batch(4, 8), batch(4, 8, seed=1))
    assert called(program) == ["a.inner", "b"]


def held_after(run: Callable[[], Any]) -> int:
    """The bytes that a forward leaves allocated: what is saved for backward, and its result."""
    if DEVICE == "cuda":
        before, result = torch.cuda.memory_allocated(), run()
        held = torch.cuda.memory_allocated() - before
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = run()
        held = sum(event.self_cpu_memory_usage for event in profile.events())
    assert result is not None
    return held


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("reentrant", every(2, [False, True]))
def test_a_checkpointed_transformer_saves_no_more_than_in_plain_pytorch(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=32, n_embd=64, n_layer=6, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).train()
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[1, 20:] = 0
    inputs = {"input_ids": torch.arange(4 * 32).view(4, 32) % 16, "attention_mask": mask}
    inputs["labels"] = inputs["input_ids"]
    plainly = held_after(lambda: model(**inputs)["loss"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    cuts = {"transformer.h.2": "before", "transformer.h.4": "before"}
    graph = split(chain(passes.default(), recorded(model, inputs, cuts=cuts)))
    expected, found = held_after(lambda: model(**inputs)["loss"]), held_after(lambda: run_stages(graph, inputs))
    assert found < 1.05 * expected < 0.2 * plainly
    expected = step(model, lambda: {"loss": model(**inputs)["loss"]})
    assert_same(step(model, lambda: run_stages(graph, inputs)), expected)


class Lazy(nn.Module):
    """Sets an attribute in its first call only; another one in each."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.a, self.b, self.counts = nn.Linear(8, 8), nn.Linear(8, 8), counts
        self.ready, self.calls = False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.ready = True
        if self.counts:
            self.calls += 1
        return self.b(fxpipe.stage_boundary(self.a(x)))


def test_an_attribute_set_in_the_first_call_alone_is_no_hindrance() -> None:
    model = Lazy(counts=False)
    recorded(model, batch(4, 8))
    assert model.ready is False


def test_an_attribute_set_in_every_call_is_refused() -> None:
    model = Lazy(counts=True)
    with pytest.raises(TraceError, match=r"forward changes Lazy.calls(.|\n)*test_record.py"):
        recorded(model, batch(4, 8))
    assert (model.ready, model.calls) == (False, 0)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(Block() for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x)


def test_a_named_cut_leaves_the_submodule_behind_it_whole() -> None:
    program = recorded(Deep(), batch(4, 8), cuts={"tower.2": "before", "tower.3.inner": "after"})
    assert called(program)[2] == "tower.2"
    assert [name for name in called(program) if name.startswith("tower.3")] == ["tower.3.inner", "tower.3.norm"]


def test_autocast_around_the_call_is_no_mode_of_its_own() -> None:
    autocast = (Autocast(DEVICE, True, torch.bfloat16),)
    torch.manual_seed(0)
    model, inputs = Modes(), batch(4, 8)
    program = recorded(model, inputs, autocast=autocast)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = step(model, lambda: model(**inputs))
        assert_same(step(model, lambda: replayed(program, inputs)), expected)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(step(model, lambda: staged(program, inputs)), expected)


def test_a_loss_functions_module_is_recorded_with_its_constants() -> None:
    torch.manual_seed(0)
    model, loss = Residual(), nn.CrossEntropyLoss(weight=torch.rand(8))
    inputs = {**batch(4, 8), "target": torch.arange(4)}
    program = recorded(model, inputs, loss_fn=loss)
    assert list(program.constants) == ["_constant0"]
    state = copy.deepcopy(model.state_dict())
    expected = step(model, lambda: loss(model(inputs["x"]), inputs["target"]))
    model.load_state_dict(state)
    assert_same(step(model, lambda: replayed(program, inputs)), expected)


@torch.library.custom_op("fxpipe_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.numpy(force=True).__mul__(2).sum() * torch.ones(3, device=x.device)


class Foreign(nn.Module):
    """A kernel that nothing but real memory will do for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

        class Kernel(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return without_fake(x.detach())

        self.kernel, self.last = Kernel(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(fxpipe.stage_boundary(h)) + self.kernel(h)


def test_an_operator_without_a_fake_kernel_is_run_on_made_up_numbers() -> None:
    torch.manual_seed(0)
    assert "kernel" in called(check(Foreign(), batch(4, 8), batch(4, 8, seed=1)))


class Refused(nn.Module):
    """Does, between its submodules, what ``what`` does to their values."""

    def __init__(self, what: Callable[[Refused, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(8, 8), nn.Linear(8, 8), what
        self.outside, self.table = torch.ones(8, requires_grad=True), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.a(x))
        found = self.what(self, h)
        return self.b(h + found if isinstance(found, Tensor) else h)


def draw(model: Refused, h: Tensor) -> Tensor:
    return h * random.random()


def boundary_in_checkpoint(model: Refused, h: Tensor) -> Any:
    return checkpoint(lambda h: fxpipe.stage_boundary(h * 2) * 2, h, use_reentrant=False)


def write_in_checkpoint(model: Refused, h: Tensor) -> Any:
    other = torch.zeros_like(h)
    return checkpoint(lambda h: other.add_(h), h, use_reentrant=False)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda model, h: h.sum().item(), "looks at the values of a tensor (item)"),
        (lambda model, h: h.detach().numpy(), "looks at the values of a tensor (numpy)"),
        (lambda model, h: h * model.outside, "needs a gradient and is no parameter"),
        (lambda model, h: model.table.add_(1), "writes a tensor that is no buffer"),
        (draw, "random numbers are drawn or seeded in forward"),
        (lambda model, h: h.register_hook(lambda gradient: gradient * 2), "register_hook"),
        (lambda model, h: torch.autograd.grad(h.sum(), h)[0], "grad on a tensor"),
        (lambda model, h: torch.rand(8, generator=torch.Generator()), "a Generator"),
        (lambda model, h: setattr(h, "data", h * 2), "sets .data of a tensor"),
        (lambda model, h: setattr(model, "last", h + getattr(model, "last", 0.0)), "not made by an operation of torch"),
        (lambda model, h: torch.vmap(lambda row: row * 2)(h), "uses torch.vmap on tensors that need a gradient"),
        (lambda model, h: model.nothing, "no attribute 'nothing'"),
        (lambda model, h: fxpipe.stage_boundary([1, 2]), "in which there is no tensor"),
        (boundary_in_checkpoint, "amid a function given to torch.utils.checkpoint"),
        (write_in_checkpoint, "writes a tensor from outside"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_the_users_line(
    what: Callable[[Refused, Tensor], Any], message: str
) -> None:
    model = Refused(what)
    before, state = dict(vars(model)), torch.get_rng_state()
    with pytest.raises(TraceError, match=re.escape(message)) as refusal:
        recorded(model, batch(4, 8))
    assert "test_record.py" in str(refusal.value)
    assert vars(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(is_fake(tensor) for tensor in (*model.parameters(), *model.buffers()))


class Odd(nn.Module):
    """Writes that nothing reads, an operator for each way to write one, a submodule under two names, and others."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args) * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).relu()

    def __init__(self) -> None:
        super().__init__()
        self.own, self.norm = self.Own(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.again = self.own
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.compiled = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), backend="eager")
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, x: Tensor) -> Tensor:
        unused = torch.zeros(8)
        unused[0] = 1
        unused.add_(2)
        h = fxpipe.stage_boundary(self.again(self.own(x)) + self.norm(x))
        h = 2 - (2 ** h.tanh()) + (1 / (h.abs() + 1)) - (h.detach() // 2) % 3 + (-h) * abs(h)
        h = h * ((h > 0) & (h < 1) | ~(h > 2)) + h.topk(2).values.sum() + h.sort()[0]
        h = self.spectral(torch.stack([row * place for place, row in enumerate(h)]))
        low, high = reversed(self.compiled(h).split(4, 1))
        h = torch.cat([low, high.T.mT.T.double().to(h).type_as(h)], 1) @ self.own.inner.weight.T.contiguous()
        h = h * self.scale[0] + torch.arange(8) + torch.tensor([1.0] * 8) + h.new_ones(8)
        return torch.einsum("bi,ij->bj", torch.where(h > 0, h, 0.0), self.own.inner.weight)


def test_whatever_way_it_is_written() -> None:
    torch.manual_seed(0)
    program = check(Odd(), batch(4, 8), batch(4, 8, seed=1))
    assert called(program) == ["own", "own", "norm", "spectral", "compiled"]
    assert not any(node.name.startswith(("zeros", "setitem")) for node in program.graph.nodes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_torchscript_module_is_refused() -> None:
    model = Residual()
    model.second = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(TraceError, match="second is a TorchScript module"):
        recorded(model, batch(4, 8))


def test_backward_hooks_on_a_submodule_that_is_cut_are_refused() -> None:
    model = Residual()
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(TraceError, match=r"Residual has backward hooks(.|\n)*test_record.py"):
        recorded(model, batch(4, 8))


class _Parts(nn.Module):
    """Opaque submodules in front of a boundary; a forward for each case."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.part = nn.Linear(8, 8), nn.Linear(8, 8), part or nn.Linear(8, 8)
        self.ready = False


class Swapped(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + functional_call(self.a, dict(self.part.named_parameters()), (x,))
        return self.b(fxpipe.stage_boundary(h))


def test_a_submodule_called_with_parameters_of_another_uses_those() -> None:
    torch.manual_seed(0)
    assert called(check(Swapped(), batch(4, 8))) == ["a", "b"]


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


class SetsOnce(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.part.gain, self.ready = 2.0, True
        return self.b(fxpipe.stage_boundary(self.part(x)))


class SetsForACall(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        self.part.eval()
        h = self.part(x)
        self.part.train()
        return self.b(fxpipe.stage_boundary(h))


class SetsInside(_Parts):
    """The same in a submodule that is itself kept, which does so in every step."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict())
        self.sets = _EvaluatesInside()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(fxpipe.stage_boundary(self.sets(x)))


class _EvaluatesInside(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        self.part.eval()
        h = F.dropout(self.part(x), 0.5, self.part.training)
        self.part.train()
        return h


@pytest.mark.parametrize(
    ("model", "name", "line"),
    [
        (SetsOnce(Gain()), "part.gain", "self.part.gain, self.ready = 2.0, True"),
        (SetsForACall(nn.Dropout(0.9)), "part.training", "self.part.eval()"),
    ],
)
def test_attributes_of_kept_submodules_set_from_outside_are_refused(model: nn.Module, name: str, line: str) -> None:
    with pytest.raises(TraceError, match=rf"forward sets {name} from outside .* before the model") as raised:
        recorded(model, batch(4, 8))
    assert line in str(raised.value)


def test_attributes_set_inside_a_kept_submodule_are_its_own() -> None:
    assert called(check(SetsInside(), batch(4, 8))) == ["sets", "b"]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        self.calls += 1
        return x * 2, 1.0 / self.calls


class Coin(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        return x * 2, random.random() < 0.5


class UsesPlain(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        h, factor = self.part(self.a(x))
        return self.b(fxpipe.stage_boundary(h * factor))


@pytest.mark.parametrize(("part", "said"), [(Counts, "part.calls"), (Coin, "random numbers are drawn")])
def test_a_plain_result_that_changes_from_step_to_step_is_refused(part: type[nn.Module], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        recorded(UsesPlain(part()), batch(4, 8))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random())


class Previous(nn.Module):
    """Reads what it was given in the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        previous, self.previous = self.previous, x.detach()
        return torch.zeros(x.shape) if previous is None else previous


class InTwoStages(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        z = self.part(x * 2)
        return self.b(fxpipe.stage_boundary(self.a(z))) + z


@pytest.mark.parametrize("part", [Noise, Previous])
def test_a_submodule_with_python_state_runs_once(part: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = InTwoStages(part())
    plain = copy.deepcopy(model)
    program = recorded(model, batch(4, 8))
    graph = split(chain(passes.default(), program))
    for seed in range(3):
        random.seed(seed)
        expected = step(plain, lambda seed=seed: plain(**batch(4, 8, seed=seed)))
        random.seed(seed)
        assert_same(step(model, lambda seed=seed: run_stages(graph, batch(4, 8, seed=seed))), expected)


class HooksItsArgument(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 0.1)
        return y * 2


class Hooking(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(fxpipe.stage_boundary(h + self.part(h, x)))


def test_a_gradient_hook_on_an_argument_of_a_submodule_is_refused() -> None:
    with pytest.raises(TraceError, match=r"register_hook[\s\S]*x\.register_hook"):
        recorded(Hooking(HooksItsArgument()), batch(4, 8))
