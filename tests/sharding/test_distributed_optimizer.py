"""The optimizer of pieces: halves of parameters stepped apart are what plain torch.optim makes of whole ones."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxpipe.distributed.transport import LocalTransport
from fxpipe.errors import CheckpointError, RunError
from fxpipe.precision import Precision, cast_parameters
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.sharding.gradients import OptimizerPieces, Piece
from fxpipe.sharding.optimizer_class import ELEMENTWISE, is_elementwise
from fxpipe.sharding.parameter_groups import resolve_groups, whole_groups
from fxpipe.tensors.pieces import Slice
from tests.device import DEVICE
from tests.thinned import in_turn, pairwise

STEPS = 5
CLASSES = sorted(ELEMENTWISE, key=lambda cls: cls.__name__)


class Halves:
    """A store of one rank out of two, by hand: each has half of every parameter, or every other one whole.

    Gradients are the parameters' own, whole on both ranks.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], rank: int = 0, ranks: int = 2) -> None:
        self._parameters, self._rank, self._ranks = parameters, rank, ranks
        self._whole: set[str] = set()
        self.published: list[OptimizerPieces] = []
        self.sums = GradientSums(zero=1 if ranks > 1 else 0, shards=ranks, rank=rank, replicas=1)

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        wanted = set(names)
        self._whole = self._whole | wanted if whole else self._whole - wanted
        return OptimizerPieces(1, tuple(piece for piece in self.pieces() if piece.name in wanted))

    def pieces(self) -> list[Piece]:
        found = []
        for number, (name, parameter) in enumerate(self._parameters.items()):
            if self._ranks == 1 or (name in self._whole and number % self._ranks == self._rank):
                found.append(self._piece(name, parameter, 0, parameter.numel(), whole=True))
            elif name not in self._whole:
                cuts = [parameter.numel() * rank // self._ranks for rank in range(self._ranks + 1)]
                found.append(self._piece(name, parameter, *cuts[self._rank : self._rank + 2], whole=False))
        return found

    @staticmethod
    def _piece(name: str, parameter: nn.Parameter, start: int, stop: int, whole: bool) -> Piece:
        def part(tensor: Tensor) -> Tensor:
            return tensor if whole else tensor.as_strided((tensor.numel(),), (1,))[start:stop]

        def gradient() -> Tensor | None:
            return None if parameter.grad is None else part(parameter.grad)

        return Piece(name, parameter, start, stop, part(parameter.detach()), True, gradient)

    def publish(self, claim: OptimizerPieces, frozen: bool) -> None:
        self.published.append(claim)

    def settle(self) -> None:
        """Nothing is ever under way."""


class World(LocalTransport):
    """One of two ranks, of which the other one has found nothing."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def ranks(self, scope: Any) -> tuple[int, ...]:
        return (0, 1)

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        assert scope == "all"
        return (item, 0) if self.rank == 0 else (0, item)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(16, 24)
        self.b = nn.Linear(24, 4)
        self.image = nn.Conv2d(4, 8, 2)
        self.image.weight.data = self.image.weight.data.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.idle = nn.Parameter(torch.ones(6))


def gradients(model: nn.Module, step: int, dtype: torch.dtype | None = None) -> None:
    """Gives every parameter but ``idle`` a gradient that step and name decide."""
    torch.manual_seed(100 + step)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape)
        if name != "idle":
            parameter.grad = torch.empty_like(parameter, dtype=dtype or parameter.dtype).copy_(values)


def held(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def of_rank(model: nn.Module, rank: int, cls: Any, params: Any = None, ranks: int = 2, **kw: Any) -> Any:
    """The optimizer of one of two ranks, both of which step the same model."""
    options: dict[str, Any] = {"precision": None, "offload": False, "originals": {}, "elementwise": None}
    named = {key: kw.pop(key, default) for key, default in options.items()}
    named |= {"own": held(model), "whole": held(model), "steppers": {}}
    store = Halves(dict(model.named_parameters()), rank, ranks)
    return DistributedOptimizer(
        cls, params, kw, store, World(rank), cause=str, alone=lambda called: contextlib.nullcontext(), **named
    )


def both(model: nn.Module, cls: Any, params: Any = None, **kw: Any) -> list[Any]:
    originals = kw.pop("originals", {})  # each takes its own out of a dict of its own
    return [
        of_rank(model, rank, cls, params() if callable(params) else params, originals=dict(originals), **kw)
        for rank in range(2)
    ]


def same_bits(mine: nn.Module, plain: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), f"{name}: {(a - b).abs().max()}"


def run(model: nn.Module, optimizers: list[Any], schedulers: list[Any], steps: Iterable[int]) -> None:
    for step in steps:
        gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


# --- the same bits as plain torch.optim ---

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


MADE: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {}) for cls in CLASSES),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("made", "scheduler", "offload"), in_turn(MADE, list(SCHEDULERS), [False, True]))
def test_halves_stepped_apart_equal_the_plain_optimizer_bit_for_bit(made: Any, scheduler: str, offload: bool) -> None:
    (cls, kw), mine, plain = made, Model(), Model().to("cpu" if offload else DEVICE)
    optimizers, expected = both(mine, cls, lr=0.05, offload=offload, **kw), cls(plain.parameters(), lr=0.05, **kw)
    memory = {tensor.untyped_storage().data_ptr() for tensor in mine.parameters()}
    for target in itertools.chain(*optimizers[0]._targets):
        assert (target.tensor.untyped_storage().data_ptr() in memory) == (not offload)
    run(mine, optimizers, [SCHEDULERS[scheduler](o) for o in optimizers], range(STEPS))
    run(plain, [expected], [SCHEDULERS[scheduler](expected)], range(STEPS))
    same_bits(mine, plain)
    assert torch.equal(mine.idle, torch.ones(6))


# --- whole tensors ---


def test_what_is_not_known_to_be_elementwise_gets_whole_tensors() -> None:
    mine, plain = Model(), Model()
    optimizers = both(mine, torch.optim.Adafactor, lr=0.05)
    expected = torch.optim.Adafactor(plain.parameters(), lr=0.05)
    run(mine, optimizers, [], range(STEPS))
    run(plain, [expected], [], range(STEPS))
    same_bits(mine, plain)
    assert not optimizers[0].state.keys() & optimizers[1].state.keys()


def test_the_table_holds_exact_classes_behind_partials_and_can_be_overruled() -> None:
    class MyAdam(torch.optim.Adam):
        pass

    assert is_elementwise(functools.partial(torch.optim.Adam, lr=0.1))
    assert not is_elementwise(MyAdam)
    assert not is_elementwise(torch.optim.Muon)
    model = Model()
    whole, halves = of_rank(model, 0, MyAdam), of_rank(model, 0, MyAdam, elementwise=True)
    assert type(whole.state_dict()["state"]["a.weight"]["exp_avg"]) is Tensor
    (half,) = halves.state_dict()["state"]["a.weight"]["exp_avg"].__create_chunk_list__()
    assert (tuple(half.offsets), tuple(half.sizes)) == ((0, 0), (12, 16))


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.SparseAdam, functools.partial(torch.optim.LBFGS)])
def test_what_cannot_step_pieces_is_refused(cls: Any) -> None:
    with pytest.raises(RunError, match=r"torch\.optim\.(LBFGS|SparseAdam) .*; write torch.optim.AdamW"):
        of_rank(Model(), 0, cls)


# --- stepping ---


def test_a_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    model = Model()
    optimizer = of_rank(model, 0, torch.optim.SGD, ranks=1, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model.scale * 3).square()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(2.25)
    assert model.scale.item() == pytest.approx(0.5 - 0.1 * 9.0)


def calls_of_hooks(optimizer: Any, model: nn.Module) -> list[tuple[str, Any]]:
    """What torch's hooks on the steps of all optimizers see in two steps."""
    calls: list[tuple[str, Any]] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda stepped, *_: calls.append(("before", stepped))),
        register_optimizer_step_post_hook(lambda stepped, *_: calls.append(("after", stepped))),
    ]
    try:
        made = optimizer()
        run(model, [made], [], [0, 1])
        made.state_dict()
    finally:
        for hook in hooks:
            hook.remove()
    assert all(stepped is made for _, stepped in calls)
    return [when for when, _ in calls]


def test_hooks_on_the_steps_of_all_optimizers_run_once_with_the_users_own() -> None:
    """Also where an optimizer is tried out on small tensors, because each rank steps a part of its parameters."""
    plain, mine = Model(), Model()
    expected = calls_of_hooks(lambda: torch.optim.AdamW(plain.parameters()), plain)
    assert expected == ["before", "after"] * 2
    for cls in (torch.optim.AdamW, torch.optim.Adafactor):
        assert calls_of_hooks(lambda cls=cls: of_rank(mine, 0, cls), mine) == expected


def test_a_group_added_later_is_stepped() -> None:
    mine, plain = Model(), Model()
    optimizers, expected = both(mine, torch.optim.AdamW, "a.*"), torch.optim.AdamW(plain.a.parameters())
    run(mine, optimizers, [], [0])
    run(plain, [expected], [], [0])
    for optimizer in optimizers:
        optimizer.add_param_group({"params": "b.*", "lr": 0.5})
    expected.add_param_group({"params": list(plain.b.parameters()), "lr": 0.5})
    run(mine, optimizers, [], [1, 2])
    run(plain, [expected], [], [1, 2])
    same_bits(mine, plain)


# --- precision and offload ---


def reference(
    originals: dict[str, Tensor], cls: Any, steps: Iterable[int], device: str = DEVICE, **kw: Any
) -> dict[str, Tensor]:
    """Masters as plain torch.optim steps them on that device, with gradients in float32."""
    model = Model().to(device)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(originals[name])
    optimizer = cls(model.parameters(), **kw)
    run(model, [optimizer], [], steps)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])
def test_masters_start_from_the_values_before_they_were_rounded(cls: Any, offload: bool) -> None:
    model = Model()
    originals = {name: tensor.clone() for name, tensor in cast_parameters(model, Precision()).items()}
    optimizers = both(model, cls, lr=0.01, precision=Precision(), offload=offload, originals=originals)
    for step in range(STEPS):
        gradients(model, step, torch.float32)
        for optimizer in optimizers:
            optimizer.step()
    expected = reference(originals, cls, range(STEPS), "cpu" if offload else DEVICE, lr=0.01)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.cpu(), expected[name].bfloat16().cpu()), name
        parts = [o.state_dict()["state"] for o in optimizers]
        masters = [part[name]["master"] for part in parts if name in part]
        in_memory = expected[name].as_strided((parameter.numel(),), (1,))
        flat = [m.local if isinstance(m, Slice) else m.as_strided((m.numel(),), (1,)) for m in masters]
        assert torch.equal(torch.cat(flat), in_memory), name


# --- state that the user writes ---


def like_parameters(optimizer: Any) -> None:
    for parameter, entry in optimizer.state.items():
        entry.update({key: torch.zeros_like(parameter if key != "step" else entry[key]) for key in entry})


RESETS: dict[str, Callable[[Any], Any]] = {
    "values": lambda o: [value.zero_() for entry in o.state.values() for value in entry.values()],
    "like parameters": like_parameters,
    "popped": lambda o: [o.state.pop(parameter, None) for parameter in o.param_groups[0]["params"]],
    "cleared": lambda o: o.state.clear(),
    "assigned": lambda o: setattr(o, "state", defaultdict(dict)),
    "set": lambda o: o.__setstate__({"state": defaultdict(dict)}),
}


@pytest.mark.parametrize(("reset", "kind"), pairwise(list(RESETS), ["parts", "masters", "offload", "whole"]))
def test_a_reset_of_the_state_reaches_the_step(reset: str, kind: str) -> None:
    """ReLoRA and warm restarts: ``state`` had nothing under the parameters, and nothing was reset."""
    mine, plain = Model(), Model().to("cpu" if kind == "offload" else DEVICE)
    options: dict[str, Any] = {"lr": 0.05, "offload": kind == "offload", "precision": None}
    if kind == "masters":
        options |= {"precision": Precision(), "originals": cast_parameters(mine, Precision())}
    made = both if kind != "whole" else lambda *args, **kw: [of_rank(mine, 0, torch.optim.Adam, ranks=1, **kw)]
    optimizers = made(mine, torch.optim.Adam, **options)
    expected = torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(4):
        gradients(mine, step, torch.float32)
        gradients(plain, step)
        for optimizer in [*optimizers, expected]:
            if step == 2:
                RESETS[reset](optimizer)
            optimizer.step()
    for (name, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu().to(a.dtype)), name


# --- groups ---


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def names_in(groups: list[dict[str, Any]], model: nn.Module) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in groups]


def test_groups_by_parameter_name_pattern_and_predicate() -> None:
    model = Tied()
    groups = [
        {"params": "*.bias", "weight_decay": 0.0},
        {"params": lambda name, p: p.ndim == 2},
        {"params": [model.norm.weight]},
    ]
    resolved = resolve_groups(groups, held(model), held(model))
    assert names_in(resolved, model) == [["norm.bias", "head.bias"], ["embed.weight"], ["norm.weight"]]
    assert resolved[0]["weight_decay"] == 0.0
    assert groups[0]["params"] == "*.bias"  # the user's own list is left alone


@pytest.mark.parametrize("params", ["embed.weight", "head.weight", ["head.weight", "embed.weight"], ["*.weight"]])
def test_a_tied_parameter_goes_by_any_of_its_names(params: Any) -> None:
    model = Tied()
    (group,) = resolve_groups([{"params": params}], held(model), held(model))
    assert sum(p is model.embed.weight for p in group["params"]) == 1


def test_all_by_default_each_once_and_bare_lists_are_one_group() -> None:
    model = Tied()
    everything = [name for name, _ in model.named_parameters()]
    for params in (None, model.parameters(), model.named_parameters(), list(held(model)), "*"):
        assert names_in(resolve_groups(params, held(model), held(model)), model) == [everything]


def test_pairs_keep_their_names_as_in_torch() -> None:
    model = Tied()
    for optimizer in both(model, torch.optim.SGD, list(model.named_parameters()), lr=0.1):
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_what_other_ranks_hold_leaves_a_group_empty() -> None:
    model = Tied()
    mine = {name: p for name, p in held(model).items() if name.startswith("norm")}
    whole = held(copy.deepcopy(model).to("meta")) | mine
    groups = [
        {"params": "head.*"},
        {"params": lambda name, p: p.ndim == 1 and "bias" not in name},
        {"params": "norm.bias"},
    ]
    assert names_in(resolve_groups(groups, mine, whole), model) == [[], ["norm.weight"], ["norm.bias"]]
    assert resolve_groups([whole["head.bias"]], mine, whole) == [{"params": []}]
    assert resolve_groups([], {}, whole) == [{"params": []}]
    assert len(torch.optim.AdamW(resolve_groups("head.*", mine, whole)).param_groups) == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("*.bais", r"group 0 asks for '\*\.bais', which fits no parameter of the model; known: \"norm\.bias\""),
        (["norm.wieght"], r"did you mean \"norm\.weight\"\?"),
        (lambda name, p: p.ndim == 7, r"asks for .*<lambda>\(name, parameter\), which is true for no parameter"),
    ],
)
def test_what_fits_nothing_in_the_whole_model_is_an_error(params: Any, message: str) -> None:
    model = Tied()
    with pytest.raises(RunError, match=message):
        resolve_groups(params, {}, held(model))


# --- state dicts ---


def trained(cls: Any, **kw: Any) -> tuple[Model, list[Any]]:
    model = Model()
    if "precision" in kw:
        kw["originals"] = {n: t.clone() for n, t in cast_parameters(model, kw["precision"]).items()}
    return model, both(model, cls, lr=0.05, **kw)


def steps(model: nn.Module, optimizers: list[Any], numbers: Iterable[int]) -> None:
    for number in numbers:
        gradients(model, number, torch.float32)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize(
    ("cls", "kw", "optimizer_first"),
    in_turn([*CLASSES, torch.optim.Adafactor], [{}, {"precision": Precision()}, {"offload": True}], [False, True]),
)
def test_what_is_loaded_goes_on_bit_for_bit(cls: Any, kw: dict[str, Any], optimizer_first: bool) -> None:
    model, optimizers = trained(cls, **kw)
    steps(model, optimizers, range(2))
    saved = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers]))
    steps(model, optimizers, range(2, 5))
    again, others = trained(cls, **kw)
    steps(again, others, [7])
    for load_optimizer in (optimizer_first, not optimizer_first):
        if load_optimizer:
            for other, part in zip(others, saved[1], strict=True):
                other.load_state_dict(part)
        else:
            again.load_state_dict(saved[0])
            for other in others:
                other.reload()
    steps(again, others, range(2, 5))
    same_bits(again, model)


def test_groups_and_names_are_those_of_torchs_own_state_dict_of_the_plain_model() -> None:
    """But for whole tensors in place of slices: what DCP saves of one loads in the other."""
    params = [{"params": ["a.bias", "b.bias"], "weight_decay": 0.0}, {"params": "*.weight", "lr": 0.1}]
    mine, plain = Model(), Model()
    optimizer = of_rank(mine, 0, torch.optim.AdamW, params, lr=0.05)
    named = dict(plain.named_parameters())
    expected = torch.optim.AdamW(
        [
            {"params": [named["a.bias"], named["b.bias"]], "weight_decay": 0.0},
            {"params": [named["a.weight"], named["b.weight"], named["image.weight"]], "lr": 0.1},
        ],
        lr=0.05,
    )
    for model, one in ((mine, optimizer), (plain, expected)):
        gradients(model, 0)
        one.step()
    got, wanted = optimizer.state_dict(), get_optimizer_state_dict(plain, expected)
    assert got["param_groups"] == wanted["param_groups"]
    assert {n: set(e) for n, e in got["state"].items()} == {n: set(e) for n, e in wanted["state"].items()}
    shapes = [{n: e["exp_avg"].shape for n, e in part["state"].items()} for part in (got, wanted)]
    assert shapes[0] == shapes[1]


def broken(state: dict[str, Any], how: str) -> dict[str, Any]:
    state = copy.deepcopy(state)
    entry = state["state"]["b.bias"]
    if how == "lacks":
        state["param_groups"][0]["params"].remove("b.bias")
    elif how == "foreign":
        state["state"]["c.bias"] = entry
    elif how == "shape":
        entry["exp_avg"] = torch.ones(3)
    elif how == "slice":
        entry["exp_avg"] = Slice(torch.ones(2), 1, (4,), (0,))
    elif how == "numbers":
        state["param_groups"][0]["params"] = [0, 1, 2]
    elif how == "class":
        entry["momentum_buffer"] = entry.pop("exp_avg")
    elif how == "groups":
        first, second = state["param_groups"][0], {**state["param_groups"][0], "params": ["b.bias"]}
        first["params"].remove("b.bias")
        state["param_groups"].append(second)
    else:
        del state["state"]
    return state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("lacks", r"parameter groups lack 'b\.bias'; did you mean"),
        ("foreign", r"the model has no 'c\.bias'; did you mean"),
        ("shape", r"exp_avg of b\.bias has shape \[4\], the state dict has \[3\]"),
        ("slice", r"exp_avg of b\.bias has shape \[4\], the state dict has Slice\(\[4\], elements 1 to 3"),
        ("numbers", r"parameter groups lack 'scale'.*torch's get_optimizer_state_dict"),
        ("class", r"b\.bias comes with .*momentum_buffer.* needs .*exp_avg, .*same class"),
        ("groups", r"group 0 has image\.bias and b\.bias, of the groups \[0, 1\] that were saved"),
        ("state", r"it is what optimizer\.state_dict\(\) gave"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(how: str, message: str) -> None:
    model, optimizers = trained(torch.optim.AdamW, precision=Precision())
    steps(model, optimizers, range(2))
    saved = broken(optimizers[0].state_dict(), how)
    steps(model, optimizers, [2])
    before = copy.deepcopy(optimizers[0].state_dict())
    with pytest.raises(CheckpointError, match=message):
        optimizers[0].load_state_dict(saved)
    after = optimizers[0].state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        for name, value in entry.items():
            now = after["state"][key][name]
            assert torch.equal(*(getattr(tensor, "local", tensor) for tensor in (value, now))), (key, name)


def test_reload_takes_full_precision_values_where_there_are_some() -> None:
    model, optimizers = trained(torch.optim.SGD, precision=Precision())
    values = torch.randn(24)
    model.a.bias.data.copy_(values)
    model.b.bias.data.fill_(2.0)
    optimizers[0].reload({"a.bias": values})
    state = optimizers[0].state_dict()["state"]
    assert torch.equal(state["a.bias"]["master"].local, values[:12])
    assert torch.equal(state["b.bias"]["master"].local, torch.full((2,), 2.0))


def test_groups_of_all_ranks_are_in_the_models_order_and_a_rank_that_has_none_is_named() -> None:
    rank = "rank {}".format
    groups = [[["c", "b"], ["d"]], [["a"], []]]
    assert whole_groups(groups, "abcd", rank) == [("a", "b", "c"), ("d",)]
    with pytest.raises(RunError, match=r"^rank 1 could not make the optimizer: no parameter is named 'e'"):
        whole_groups([groups[0], "no parameter is named 'e'"], "abcd", rank)
