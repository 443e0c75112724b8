"""Distributed optimizer: each rank steps its pieces, as in ZeRO, in master precision, optionally on the CPU.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxpipe.distributed.activity import announced, phase
from fxpipe.distributed.transport import Transport, failing_together, member
from fxpipe.errors import FxpipeError, RunError
from fxpipe.precision import Precision, merged
from fxpipe.progress import log
from fxpipe.sharding.gradients import Gradients, OptimizerPieces, Piece
from fxpipe.sharding.optimizer_class import (
    Entry,
    NumbersOfParts,
    OptimizerMaker,
    check_class,
    first_options,
    initial_state,
    is_elementwise,
    is_initial,
    looks_across,
    made_by,
    steps_frozen,
    unwrapped,
)
from fxpipe.sharding.optimizer_state import (
    MASTER,
    Target,
    check_saves_all,
    cut_to_fit,
    entry_to_load,
    entry_to_save,
    originals_of,
    read_state_dict,
    refuse_torchs_helpers,
)
from fxpipe.sharding.parameter_groups import first_names, options_of, resolve_groups, whole_groups
from fxpipe.tensors.dtensors import is_dtensor, local, settle_foreach
from fxpipe.torch_compat.modules import without_step_hooks
from fxpipe.validation import shown


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer of this rank's parameters. An inner optimizer ``cls(groups, **kw)`` steps this rank's pieces.

    ``param_groups`` hold the model's own parameters; the next step uses the options that a scheduler or the user writes
    into them. ``state`` holds the inner optimizer's entries by the model's own parameters; of a parameter that ranks
    step in parts, this rank's part. The next step uses the values and entries that the user writes into it, or the dict
    that replaces it. Several optimizers may share a model.

    A parameter that no rank used has no gradient, and stays unchanged. With float16 all ranks skip a step if any rank's
    gradient has an inf or nan, whichever optimizer the gradient belongs to; ``skipped_steps`` counts skipped steps
    (``steps`` counts all calls of ``step``), and rank 0 warns of the first, with the cause if it is known. If gradients
    are sharded, ``zero_grad(set_to_none=False)`` also sets them to None. Other attributes and methods are the inner
    optimizer's; a method, such as ``eval`` of an optimizer that averages parameters, is a collective call.

    ``forward_backward.optimizer`` makes it, and documents ``cls``, ``params``, ``offload`` and ``elementwise``.

    Args:
        store: pieces and their gradients. transport: gathers whether any rank has an inf or nan.
        own, whole: this rank's and the whole model's parameters, under all their names.
        originals: name → parameter before rounding, for the masters; entries are removed when a master is made.
        steppers: parameter name → the last made optimizer that steps it; shared by all optimizers of the model.
        alone: a context that refuses a step while a call of forward_backward runs.
        cause: returns why a step is skipped, if known; the same text on every rank. A collective call of all ranks.
    """

    _inner: torch.optim.Optimizer

    def __init__(
        self,
        cls: OptimizerMaker,
        params: Any,
        kw: Mapping[str, Any],
        store: Gradients,
        transport: Transport,
        *,
        own: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        precision: Precision | None,
        offload: bool,
        originals: dict[str, Tensor],
        elementwise: bool | None,
        cause: Callable[[], str],
        steppers: MutableMapping[str, DistributedOptimizer],
        alone: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        check_class(cls, store.sums.sharded or precision is not None or offload)
        self._make = functools.partial(cls, **kw)
        self._store, self._transport = store, transport
        self._own, self._all = own, whole
        self._names: dict[int, list[str]] = {}
        for name, parameter in own.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._canonical = first_names(whole)
        self._precision, self._offload = precision, offload
        self._elementwise = is_elementwise(cls) if elementwise is None else elementwise
        self._cause, self._alone, self._originals = cause, alone, originals
        self._claims: list[OptimizerPieces] = []
        self._group_names: list[tuple[str, ...]] = []
        self._exact: list[tuple[Target, Tensor]] = []  # masters loaded since the last step, of targets without copies
        self.user_keys = {key for key, value in kw.items() if value is not None}
        """The options that the user set: ranks compare them."""
        self.steps = self.skipped_steps = 0
        self.stepping = False
        self._steppers = steppers
        self._replaced = ""  # a parameter that a later optimizer steps
        # torch's constructor makes groups of the model's own parameters; the inner optimizer has their pieces.
        super().__init__(self._resolved(params), {})
        self._check_alone()
        self._steps_frozen = store.sums.sharded and not is_elementwise(cls) and bool(self._try_out(steps_frozen))
        self._targets: list[list[Target]] = []
        self._inner = settle_foreach(made_by(cls, self._claimed(self.param_groups), kw))
        self.kind = type(self._inner).__name__
        self._is_lazy = not self._inner.state
        self.defaults = self._inner.defaults
        self._show_state()
        self._exchange(self._inner.param_groups, self.param_groups)
        self._take_over()

    def _resolved(self, params: Any) -> list[dict[str, Any]]:
        """Returns this rank's part of the groups; adds all names to ``_group_names``. All ranks succeed, or none."""
        groups, failure = [], None
        try:
            groups = resolve_groups(params, self._own, self._all)
            mine: Any = [self._names_in(group) for group in groups]
        except Exception as error:  # sent to the other ranks below
            failure, mine = error, f"{type(error).__name__}: {error}"
        with announced("optimizer"), self._together():
            everyone = self._transport.gather("pipe", mine)
        if failure is not None:
            raise failure
        names = whole_groups(everyone, list(self._all), functools.partial(member, self._transport, "pipe"))
        if params is not None and not any(names):
            raise RunError(
                f"params is {shown(params)}, and has no parameter of the model; leave it out for all of them"
            )
        taken = set(itertools.chain(*self._group_names))
        twice = next((name for name in itertools.chain(*names) if name in taken), None)
        if twice is not None:
            raise RunError(f"{twice} is in a parameter group of this optimizer already")
        self._group_names += names
        self.user_keys.update(key for group in groups for key, value in options_of(group).items() if value is not None)
        return groups

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        """Returns the names of a group's parameters; RunError if a parameter is not this rank's."""
        names = []
        for parameter in group["params"]:
            if id(parameter) not in self._names:
                raise RunError(
                    f"a parameter of shape {list(parameter.shape)} is not among this rank's; "
                    "take it from forward_backward.named_parameters()"
                )
            names.append(self._canonical[self._names[id(parameter)][0]])
        return names

    def _check_alone(self) -> None:
        """RunError, on all ranks, if a step uses other parameters' gradients, and a rank steps only some parameters."""
        # Test the class alone, on small tensors, so that every rank gets the same result.
        in_parts = len(self._transport.ranks("pipe")) > 1 or self._store.shards
        if not in_parts or self._elementwise:
            return
        name, across = getattr(unwrapped(self._make), "__name__", "the optimizer"), self._try_out(looks_across)
        if across is None:
            log(
                f"fxpipe: {name} could not be tried on two small tensors, so that it is not known whether it steps a "
                "parameter by the gradients of others; each rank gives it only some of the model's"
            )
        elif across:
            raise RunError(
                f"{name} steps a parameter by the gradients of others, and each rank steps "
                "only some of the model's; turn that off (timm's Lamb: max_grad_norm=None) and call "
                "forward_backward.clip_grad_norm_(max_norm), or write torch.optim.AdamW"
            )

    def _try_out(self, question: Callable[[OptimizerMaker, Mapping[str, Any]], bool | None]) -> bool | None:
        return question(self._make, options_of(self.param_groups[0]) if self.param_groups else {})

    def _take_over(self) -> None:
        """Registers this optimizer for its parameters on all ranks, so that a replaced optimizer fails on all ranks."""
        for name in itertools.chain(*self._group_names):
            former = self._steppers.get(name, self)
            if former is not self:
                former._replaced = former._replaced or name
            self._steppers[name] = self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does, with parameters as in the constructor. A collective call of all ranks."""
        if "_inner" not in vars(self):  # called by torch's constructor, with a group that is resolved already
            super().add_param_group(param_group)
            return
        (group,) = self._resolved([param_group])
        super().add_param_group(group)
        with self._given_state():
            self._inner.add_param_group(*self._claimed([group]))
        self._exchange(settle_foreach(self._inner).param_groups, self.param_groups)
        self._take_over()

    def _claimed(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the inner optimizer's groups, which hold the tensors that this rank steps of these parameters."""
        names = [name for group in groups for parameter in group["params"] for name in self._names[id(parameter)]]
        claim = self._store.claim(names, not self._elementwise)
        self._claims.append(claim)
        pieces: dict[int, list[Piece]] = {}
        for piece in claim.pieces:
            if self._offload and is_dtensor(piece.data):
                raise RunError(
                    f"offload=True needs plain parameters, but parallelize has spread {piece.name}; leave it out, and "
                    "write fully_shard(..., offload_policy=CPUOffloadPolicy()) in parallelize"
                )
            pieces.setdefault(id(piece.parameter), []).append(piece)

        def target(piece: Piece) -> Target:
            original = originals_of(self._originals, self._names[id(piece.parameter)])
            in_parts = self._store.sums.sharded and not is_dtensor(piece.data)
            return Target(piece, original, self._precision, self._offload, in_parts)

        new = [[target(piece) for p in group["params"] for piece in pieces.get(id(p), ())] for group in groups]
        for name in names:
            self._originals.pop(name, None)
        self._targets += new
        pairs = zip(groups, new, strict=True)
        return [{**options_of(group), "params": [target.tensor for target in targets]} for group, targets in pairs]

    @staticmethod
    def _exchange(source: Sequence[Mapping[str, Any]], sink: Sequence[dict[str, Any]]) -> None:
        """Copies hyperparameters from the outer groups to the inner groups, or back."""
        for giver, taker in zip(source, sink, strict=True):
            taker.update(options_of(giver))

    @contextmanager
    def _given_state(self) -> Iterator[None]:
        """The inner optimizer has what is in ``state``, under the tensors that it steps; then ``state`` follows it."""
        targets: dict[Tensor, Target] = {target.piece.parameter: target for target in self._flat}
        entries: dict[Any, Any] = {}
        for key, entry in self.state.items():
            if key in targets:
                cut_to_fit(entry, targets[key], lambda: self._own_types)
            entries[targets[key].tensor if key in targets else key] = entry
        # in place: a wrapper, such as Lookahead, may share the dict with the optimizer inside it
        self._inner.state.clear()
        self._inner.state.update(entries)
        try:
            yield
        finally:
            self._show_state()

    def _show_state(self) -> None:
        parameters = {target.tensor: target.piece.parameter for target in self._flat}
        entries = {parameters.get(key, key): entry for key, entry in self._inner.state.items()}
        self.state.clear()
        self.state.update(entries)

    @functools.cached_property
    def _own_types(self) -> Mapping[str, torch.dtype]:
        """The keys of the tensors that the optimizer keeps, shaped like a parameter, and their types for float32."""
        entries = [initial_state(self._make, options_of(group), torch.zeros(1, 1)) for group in self.param_groups]
        values = [item for entry in entries for item in entry.items()]
        return {key: value.dtype for key, value in values if isinstance(value, Tensor) and value.ndim}

    @property
    def _flat(self) -> list[Target]:
        return list(itertools.chain(*self._targets))

    @property
    def steps_here(self) -> bool:
        """Whether this rank steps any tensor."""
        return any(self._targets)

    # stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's pieces, and starts sending them to the other ranks. A collective call of all ranks.

        ``step`` first calls ``closure``, if any, with gradients enabled, and returns its loss.
        """
        if closure is not None and not callable(closure):
            raise RunError(f"step() is given {shown(closure)}; it is None, or a function () -> loss")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._replaced:
            raise RunError(
                f"{self._replaced} is stepped by an optimizer that was made after this one; step that one, or give "
                "each of them parameters of its own"
            )
        # Ranks meet if they step parts of the same parameters, or decide on skips together; else a rank need not step.
        precision = self._precision
        skips = precision is not None and torch.float16 in (precision.compute, precision.reduce)
        meets = self._store.sums.sharded or skips
        with self._calling("step", meets):
            self.steps += 1
            broken = self._broken_ranks() if skips else ()
            if broken:
                self._skip(broken)
            else:
                with without_step_hooks():  # which run around this step, with the user's own optimizer
                    self._on_pieces(self._inner.step)
        return loss

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the inner optimizer that ``torch.optim.Optimizer`` lacks."""
        inner = vars(self).get("_inner")
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            kind = type(self).__name__ if inner is None else f"{type(self).__name__} of {type(inner).__name__}"
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        value = getattr(inner, name)
        return functools.partial(self._call, name, value) if isinstance(value, types.MethodType) else value

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Calls a method of the inner optimizer, which may write the stepped tensors."""
        with self._calling(name, self._store.sums.sharded):
            try:
                result = self._on_pieces(functools.partial(method, *args, **kw), is_step=False)
            except FxpipeError:
                raise
            except Exception as error:
                raise RunError(
                    f"{self.kind}.{name}() failed on this rank, which has a part of the parameters, their gradients "
                    f"in step() alone: {type(error).__name__}: {error}"
                ) from error
        return self if result is self._inner else result

    @contextmanager
    def _calling(self, name: str, meets: bool) -> Iterator[None]:
        """The context of ``optimizer.name()``. ``meets``: whether ranks communicate in the call."""
        called = f"optimizer.{name}"
        under_way = announced(called) if meets else phase(called, extends=False)
        with self._alone(f"{called}()"), torch.no_grad(), under_way, self._together():
            self.stepping = True
            try:
                yield
            finally:
                self.stepping = False

    def _together(self) -> AbstractContextManager[None]:
        return failing_together(self._transport, self._transport.abort, (FxpipeError,))

    def _on_pieces(self, run: Callable[[], Any], is_step: bool = True) -> Any:
        """Calls ``run``, which steps the inner optimizer or, unless ``is_step``, changes its tensors otherwise."""
        # 1. Transfers of the previous step may still write the memory that is stepped now: wait for them.
        self._store.settle()
        # 2. Copies take values that the user has written into parameters, and get the gradients. All transfers to the
        # CPU run in parallel; the step on the CPU waits for the device once.
        targets = self._flat
        gradients = [target.fetch() for target in targets]
        moving = [target.piece.data.device for target in targets if target.tensor.device != target.piece.data.device]
        if moving:
            torch.accelerator.current_stream(moving[0]).synchronize()
        pairs = zip(targets, gradients, strict=True)
        stepped = [target for target, gradient in pairs if target.take(gradient if is_step else None) or not is_step]
        # 3. Schedulers write into the outer groups, and some optimizers keep numbers in the inner groups.
        self._exchange(self.param_groups, self._inner.param_groups)
        in_parts = not self._elementwise and any(is_dtensor(target.tensor) for target in targets)
        with self._given_state(), NumbersOfParts(self.kind) if in_parts else nullcontext():
            result = run()
        self._exchange(self._inner.param_groups, self.param_groups)
        # 4. Write the copies back to the parameters, and send the stepped pieces to the ranks that use them.
        self._exact.clear()
        for target in targets:
            target.drop_gradient()
        for target in stepped:
            target.write_back()
        for claim in self._claims:
            self._store.publish(claim, not is_step or self._steps_frozen)
        return result

    def _broken_ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the world whose gradients have an inf or nan, the same on all ranks."""
        # The largest absolute value is finite if and only if all values are; ranks gather a flag each.
        gradients = [local(g) for piece in self._store.pieces() if (g := piece.current_gradient()) is not None]
        largest = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient.numel()], math.inf)
        flags = self._transport.gather_int("all", int(not math.isfinite(largest.item())))
        return tuple(rank for rank, flag in zip(self._transport.ranks("all"), flags, strict=True) if flag)

    def _skip(self, broken: Sequence[int]) -> None:
        self.skipped_steps += 1
        cause = self._cause()
        if self._transport.rank == 0 and (self.skipped_steps == 1 or cause):
            ranks = f"rank{'s' * (len(broken) > 1)} {', '.join(map(str, broken))}"
            warnings.warn(
                f"step {self.steps - 1} (from 0) was skipped on all ranks: the gradient on {ranks} has an inf or nan"
                f"{cause and f', for {cause}'}. Further ones are counted in optimizer.skipped_steps",
                RuntimeWarning,
                stacklevel=4,  # above step() and torch's wrapper around it
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The property that torch's GradScaler reads of an optimizer before it steps it.

        Raises:
            RunError: always. The loss is returned after its backward, so that a scaler would divide gradients by a
                scale that they were never multiplied by; and it would take marks of sharded gradients for inf or nan.
        """
        raise RunError(
            "a GradScaler cannot step this optimizer: the gradients are there before the loss could be scaled; write "
            "optimizer.step(), and compile(..., precision=fxpipe.Precision()) for bfloat16, which needs no scale, or "
            "fxpipe.Precision(torch.float16), which leaves out steps whose gradients have an inf or nan"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError(
            "an optimizer of forward_backward steps its very parameters, and is neither copied nor pickled; copy or "
            "save its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this optimizer's parameters, including gradients that are not summed yet."""
        super().zero_grad(set_to_none or self._store.sums.sharded)

    # state

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part, in the form of torch's ``get_optimizer_state_dict``; see ``optimizer_state``.

        ``torch.distributed.checkpoint`` merges all ranks' parts, and loads them on any topology, cut and ``zero``, or
        into the plain model's optimizer by torch's ``set_optimizer_state_dict``. A parameter that was never stepped has
        an initial state. With ``precision`` each parameter has its ``"master"``.

        Raises:
            CheckpointError: the optimizer keeps a value that belongs to no parameter, or that has a parameter's whole
                shape while ranks step slices of the parameter.
        """
        refuse_torchs_helpers()
        return self.state_to_fill(())

    def _refuse_hook(self, *args: Any, **kw: Any) -> NoReturn:
        raise RunError("state_dict() and load_state_dict() of this optimizer run no hooks; change the dict itself")

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def state_to_fill(self, saved: Container[str]) -> dict[str, Any]:
        """Returns ``state_dict`` with an initial state also for frozen parameters whose names are in ``saved``."""
        with self._given_state():
            check_saves_all(self._inner)
        # All ranks save entries of parameters that were never stepped, too, so that names do not depend on use.
        entries: dict[str, Entry] = {}
        for group, targets in zip(self.param_groups, self._targets, strict=True):
            for target in targets:
                if not target.tensor.numel() and not target.whole:
                    continue  # an empty shard
                name = self._canonical[target.piece.name]
                entry = dict(self.state.get(target.piece.parameter) or {})
                if not entry and (name in saved or target.piece.parameter.requires_grad):
                    entry = initial_state(self._make, options_of(group), target.tensor)
                entries[name] = entry_to_save(name, entry, target)
        return {
            "state": {name: entry for name, entry in entries.items() if entry},
            "param_groups": [
                {"params": list(names), **self._options(group, names)}
                for names, group in zip(self._group_names, self.param_groups, strict=True)
            ],
        }

    def _options(self, group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Returns a group's options, with None for options that a first step adds: ``dcp.load`` fills known keys."""
        if not names or self.steps > self.skipped_steps:
            return options_of(group)
        device = next((target.tensor.device for target in self._flat), None)
        scratch = torch.zeros((1,) * self._all[names[0]].ndim, device=device)
        return first_options(self._make, options_of(group), scratch)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads hyperparameters, state and masters, but no parameters; the model may be loaded before or after.

        ``state_dict`` is the result of ``state_dict`` on this rank, or, with whole tensors, of torch's
        ``get_optimizer_state_dict`` for a plain optimizer.

        Raises:
            CheckpointError: the state dict does not fit; then nothing has been changed.
        """
        refuse_torchs_helpers()
        self.load_state(state_dict, copies=True)

    def load_state(self, state_dict: Mapping[str, Any], copies: bool = False) -> None:
        """Does the work of ``load_state_dict``. Unless ``copies``, the tensors of ``state_dict`` become the state."""
        saved, groups = read_state_dict(state_dict, self._group_names, self._all)
        options: list[dict[str, Any]] = []
        masters: list[tuple[Target, Tensor]] = []
        state: defaultdict[Tensor, Entry] = defaultdict(dict)
        for group, new, targets in zip(self.param_groups, groups, self._targets, strict=True):
            own = options_of(group)
            options.append({**own, **{key: value for key, value in new.items() if value is not None or key in own}})
            for target in targets:
                name = self._canonical[target.piece.name]
                there = saved.get(name, {})
                initial = expected = initial_state(self._make, options[-1], target.tensor, shared=True)
                if not there.keys() - {MASTER}:  # saved while frozen: check whether these options need a state
                    expected = initial_state(self._make, own, target.tensor, shared=True)
                entry = entry_to_load(name, there, initial, expected, target, copies)
                if MASTER in entry:
                    masters.append((target, entry.pop(MASTER)))
                # An optimizer that makes states in its first step has no state for parameters that were never stepped.
                if not self._is_lazy or (entry and not is_initial(entry, initial)):
                    state[target.tensor] = entry or initial_state(self._make, options[-1], target.tensor)
        # Everything fits. From here on nothing raises, so that a failed load has changed nothing.
        self._store.settle()  # transfers of the previous step may still be under way
        # A parameter that is stepped itself takes the master's bits; but the model may be loaded after this.
        self._exact = [(target, master) for target, master in masters if not target.is_copy]
        with torch.no_grad():
            for target, master in masters:
                if target.is_copy:
                    target.tensor.copy_(master)
            self._restore_exact()
        self._inner.__setstate__({"state": state, "param_groups": self._inner.param_groups})
        self._show_state()
        self._exchange(copy.deepcopy(options), self.param_groups)

    def reload(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Updates the masters after parameters were written.

        ``values``: name → the written value, possibly in a higher precision than the parameter. A master that rounds to
        the new value keeps its bits, so that optimizer and model may be loaded in any order.
        """
        with torch.no_grad():
            for target in self._flat:
                target.refresh(originals_of(values or {}, self._names[id(target.piece.parameter)]))
            self._restore_exact()

    def _restore_exact(self) -> None:
        """Gives parameters that are stepped themselves the loaded masters' bits, if masters round to their values."""
        for target, exact in self._exact:
            assert self._precision is not None
            target.tensor.copy_(merged(exact, target.tensor, self._precision.compute))
