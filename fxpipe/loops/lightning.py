"""Lightning: a strategy under which a ``Trainer`` trains an unchanged ``LightningModule`` as a pipeline."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

import fxpipe
from fxpipe.distributed.topology import Topology
from fxpipe.errors import CheckpointError, FxpipeError, RunError
from fxpipe.run.forward_backward import ForwardBackward


class PipelineStrategy(DDPStrategy):  # type: ignore[misc]
    """``Trainer(strategy=PipelineStrategy(topo, example_args=(batch,), boundaries=["layers.4"]), devices=4)``.

    ``training_step`` is the model that fxpipe compiles; ``validation_step``, ``test_step`` and ``predict_step`` are its
    evaluations, with the same cuts. What they log is the mean over micro-batches and replicas, by rows. Rows are dealt
    to the replicas. The optimizer of ``configure_optimizers`` is made anew from its class, groups and defaults, and its
    schedulers go over to it. A checkpoint is Lightning's file, with the whole model's ``state_dict``, and a folder
    ``<file>.pipeline`` beside it, from which ``fit(ckpt_path=...)`` resumes.

    Args:
        topo: the ranks; ``devices`` × ``num_nodes`` is their number, or 1 for a process that plays all pipe ranks.
        example_args: ``(batch,)``, a batch of a replica, as ``training_step`` gets it.
        **options: further options of ``fxpipe.compile``.

    Raises:
        RunError: in ``fit``, with all that the Trainer or the module asks for and a pipeline does not have.
    """

    forward_backward: ForwardBackward
    """What ``fxpipe.compile`` returned, from the start of ``fit``, ``validate``, ``test`` or ``predict`` on."""

    _layer_sync: Any  # the Trainer sets it, to what sync_batchnorm=True means

    def __init__(self, topo: Topology, *, example_args: Sequence[Any], **options: Any) -> None:
        super().__init__()
        self.topo, self._example, self._options = topo, example_args, options
        self._steps: Any = None
        self.optimizers: list[Any] = []
        self._begins = True  # whether the next call is a step's first, and begins with cleared gradients

    # processes; rows differ between replicas alone

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Starts torch.distributed as ``fxpipe.init`` does, with the ranks of Lightning's environment."""
        self.set_world_ranks()
        meeting: Any = self.cluster_environment
        if self.world_size > 1:
            numbers = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
            variables = {"MASTER_ADDR": meeting.main_address, "MASTER_PORT": meeting.main_port, **numbers}
            with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
                fxpipe.init(device="cpu" if self.root_device.type == "cpu" else None)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topo.data_size, "rank": self.topo.data_rank}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        is_alone = group is None and self.topo.data_size == 1
        return tensor if is_alone else super().reduce(tensor, group or self.topo.group("batch"), reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = super().reduce(torch.tensor(int(decision), device=self.root_device), None, "sum")
        return bool(count == self.world_size) if all else bool(count)

    # setting up

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.lightning_module
        reasons, cause, fits = _reasons(self, trainer, module), None, trainer.state.fn == TrainerFn.FITTING
        if fits:
            try:
                self.setup_optimizers(trainer)  # before this rank gives up what other ranks have
                if len(self.optimizers) != 1 or not self.optimizers[0].param_groups:
                    raise RuntimeError("configure_optimizers: it returns one optimizer, with several parameter groups")
                _arguments_of(self.optimizers[0])
            except RuntimeError as error:
                reasons, cause = [*reasons, str(error)], error
        if reasons:
            raise RunError("a LightningModule is trained as a pipeline without: " + "; ".join(reasons)) from cause
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.precision_plugin.clip_grad_by_norm = self._clip
        if self._steps is None or self._steps.module is not module:
            self._compile(module)
        if fits:
            self._remake_optimizer(names)

    def _compile(self, module: Any) -> None:
        self.accelerator.setup(module.trainer)
        self.precision_plugin.convert_module(module)
        module.to(self.root_device)
        for metric in (inner for inner in module.modules() if isinstance(inner, Metric)):
            metric.distributed_available_fn = partial(bool, self.topo.data_size > 1)
            metric.process_group = self.topo.group("batch") if self.topo.data_size > 1 else None
        batch = self.precision_plugin.convert_input(move_data_to_device(self._example[0], self.root_device))
        steps = _CapturedModule(module)
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        call = steps.call("training_step", 1, [0] * takes_index)
        with steps.capturing(), self.precision_plugin.train_step_context():
            self.forward_backward = fxpipe.compile(module, self.topo, example_args=(batch, call), **self._options)
        self._steps = steps

    def _remake_optimizer(self, names: Mapping[int, str]) -> None:
        """Replaces the optimizer of ``configure_optimizers`` by one of ``forward_backward``."""
        (plain,) = self.optimizers
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in plain.param_groups]
        for group in groups:
            group["params"] = [names[id(parameter)] for parameter in group["params"]]
        optimizer = self.forward_backward.optimizer(type(plain), groups, **_arguments_of(plain))
        if self.lr_scheduler_configs:
            # torch's schedulers warn of an optimizer that none was made for; this one writes rates, and is dropped.
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            for new, group in zip(optimizer.param_groups, groups, strict=True):
                new.update({key: value for key, value in group.items() if key != "params"})
        for config in self.lr_scheduler_configs:
            _hand_over(config.scheduler, plain, optimizer)
        # The Trainer would clear gradients behind training_step, when they are complete.
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        self.optimizers, self._begins = [optimizer], True
        self._stepped = [name for group in groups for name in group["params"]]

    # steps

    def training_step(self, batch: Any, *others: Any) -> Any:
        if self._begins:
            self.forward_backward.zero_grad()
            self._begins = False
        calls = self._steps.module.trainer.accumulate_grad_batches
        call = self._steps.call("training_step", calls, others)
        with self._steps.capturing(), self.precision_plugin.train_step_context():
            loss = self.forward_backward(batch, call)
        return {**self._steps.log(call, self.forward_backward.metrics), "loss": loss * calls}

    def _evaluate(self, name: str, batch: Any, *others: Any) -> Any:
        call = self._steps.call(name, 1, others)
        with self._steps.capturing(), self.precision_plugin.val_step_context():
            outputs = self.forward_backward.evaluate(batch, call, outputs="all")
        self._steps.log(call, outputs)
        return outputs["returned"]

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    def backward(self, closure_loss: Tensor, *others: Any, **kwargs: Any) -> Any:
        """Calls the hooks around backward; ``training_step`` has run it."""
        module: Any = self.lightning_module
        return self.precision_plugin.post_backward(self.precision_plugin.pre_backward(closure_loss, module), module)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around a step's calls but the last: gradients are summed over replicas once."""
        self.forward_backward.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.forward_backward.set_requires_gradient_sync(True)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self._begins = True
        return result

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        self.forward_backward.clip_grad_norm_(float(clip_val), parameters=self._stepped)

    # checkpoints

    restore_checkpoint_after_setup = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        is_compiled = self._steps is not None  # callbacks save when setup fails, too
        return self.forward_backward.state_dict(full=True) if is_compiled else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # it is in the folder beside the file

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint and self.optimizers and self._steps is not None:
            # The folder first, with its last two steps: whatever file there is has its step beside it.
            step = checkpoint["global_step"]
            fxpipe.save(_beside(filepath), self.forward_backward, self.optimizers[0], step=step, keep=2)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)
        super().remove_checkpoint(filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.forward_backward.load_state_dict(checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        file = self._steps.module.trainer.ckpt_path
        folder = Path(_beside(file), f"step-{checkpoint['global_step']:06}")
        if not folder.is_dir():
            raise CheckpointError(f"{file} has no {folder} beside it, from which a pipeline's fit resumes")
        fxpipe.load(folder, self.forward_backward, self.optimizers[0])

    def teardown(self) -> None:
        """Leaves the model on its device: stages hold these very tensors."""
        for part in (self.precision_plugin, self.cluster_environment, self.accelerator, self.checkpoint_io):
            part.teardown()


def _beside(filepath: Any) -> str:
    """The folder beside a checkpoint's file. CheckpointError for a file that is not in a file system."""
    if "://" in str(filepath):
        raise CheckpointError(f"{filepath} is no path that ranks can write a folder to; write a shared file system's")
    return f"{os.path.realpath(filepath)}.pipeline"


def _arguments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments that an optimizer was made with, besides parameters. RuntimeError if its defaults lack any."""
    parameters = list(inspect.signature(type(optimizer)).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    if missing := [name for name in names if name not in optimizer.defaults]:
        kind = type(optimizer).__name__
        raise RuntimeError(f"{kind}: its defaults lack {', '.join(missing)}, so that another cannot be made like it")
    return {name: optimizer.defaults[name] for name in names}


def _hand_over(scheduler: Any, plain: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """A scheduler, and those inside of it, write rates of ``optimizer`` from now on."""
    scheduler.optimizer = optimizer
    for value in list(vars(scheduler).values()):
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if getattr(inner, "optimizer", None) is plain:
                _hand_over(inner, plain, optimizer)


_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
_CALLBACKS = {
    "StochasticWeightAveraging WeightAveraging": "copies the model; use fxpipe.Average in a callback of your own",
    "BaseFinetuning ModelPruning": "changes which parameters there are; freeze them in __init__",
    "LearningRateFinder BatchSizeFinder": "trains and goes back in ways of its own",
    "OnExceptionCheckpoint": "saves on one rank alone; write ModelCheckpoint(every_n_train_steps=...)",
}


def _reasons(strategy: PipelineStrategy, trainer: Any, module: LightningModule) -> list[str]:
    """What of the Trainer and the module a pipeline does not have, and what to write instead."""
    ranks, world, precision = strategy.topo.world_size, strategy.world_size, strategy.precision_plugin.precision
    clips_values = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"
    reasons = {
        f"{world} processes: the topology has {ranks} ranks; write devices={ranks}": world not in (1, ranks),
        "automatic_optimization=False: a step is forward and backward in one": not module.automatic_optimization,
        f"precision={precision!r}: write one of {', '.join(_PRECISIONS)}": precision not in _PRECISIONS,
        'gradient_clip_algorithm="value": gradients may be shards; write "norm"': clips_values,
        "sync_batchnorm=True: it would count pipe ranks; write SyncBatchNorm in the model": strategy._layer_sync,
        "backward() of the module's own": is_overridden("backward", module, LightningModule),
        "torch.compile(model): write stage_compiler=torch.compile": "training_step" in vars(module),
    }
    for callback in trainer.callbacks:
        names = {kind.__name__ for kind in type(callback).__mro__}
        for kinds, what in _CALLBACKS.items():
            reasons[f"{type(callback).__name__}, which {what}"] = bool(names & set(kinds.split()))
        if getattr(callback, "save_on_exception", False):
            reasons["save_on_exception=True: one rank alone would save"] = True
    return [reason for reason, is_so in reasons.items() if is_so]


# --- the steps of a module, as fxpipe captures them


class _CapturedModule:
    """Makes a module's forward one of its steps, whose outputs are also what it logs."""

    def __init__(self, module: LightningModule) -> None:
        self.module, self.plain = module, type(module)
        self.calls: dict[str, tuple[Any, ...]] = {}
        """A call's key → the step's name, and its arguments behind the batch."""
        self.options: dict[str, dict[str, Any]] = {}
        """A call's key → output → the options of ``self.log``, or None for what training_step returns."""
        self.reasons: list[str] = []

        def forward(step: Any, batch: Any, call: dict[str, Tensor]) -> dict[str, Any]:
            object.__setattr__(step, "__class__", self.inside)  # whose forward is the user's
            try:
                return self._run(step, batch, call)
            finally:
                object.__setattr__(step, "__class__", self.outside)

        self.inside = self._while_captured()
        self.outside = type(self.plain.__name__, (self.inside,), {"forward": forward})

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Around calls of fxpipe, each of which may capture the module."""
        self.module.__class__ = self.outside
        try:
            yield
        except FxpipeError as error:
            if self.reasons:
                raise RunError("; ".join(dict.fromkeys(self.reasons))) from error
            raise
        finally:
            self.module.__class__ = self.plain
            self.reasons.clear()

    def refuse(self, what: str, instead: str) -> NoReturn:
        self.reasons.append(f"a step is captured once, for many batches, and {what}; {instead}")
        raise RunError(self.reasons[-1])

    def call(self, name: str, calls: int, others: Sequence[Any]) -> dict[str, Tensor]:
        """An argument of forward: the step, as a key, since keys belong to the kind of a batch; and the loss's divisor,
        the number of calls that an optimizer's step takes."""
        key = f"{name} {others[1] if len(others) > 1 else 0}"
        self.calls[key] = (name, *[self.batch_index] * len(others[:1]), *others[1:])
        return {key: torch.tensor(float(calls), device=self.module.device)}

    def _run(self, step: LightningModule, batch: Any, call: Mapping[str, Tensor]) -> dict[str, Any]:
        ((key, divisor),) = call.items()
        name, *others = self.calls[key]
        self._trains, self._outputs, self._options = name == "training_step", dict[str, Any](), dict[str, Any]()
        returned = getattr(step, name)(batch, *others)
        self.options.setdefault(key, {}).update(self._options)
        if not self._trains:
            return {**self._outputs, "returned": returned}
        if returned is None:
            self.refuse("training_step returns None, to skip it", "return a loss")
        outputs = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        loss = outputs.pop("loss")
        is_sum = isinstance(loss, fxpipe.Sum)
        loss = fxpipe.Sum(loss.total / divisor, loss.count) if is_sum else loss / divisor
        self.options[key].update(dict.fromkeys(outputs))
        return {**self._outputs, **outputs, "loss": loss}

    def log(self, call: Mapping[str, Tensor], outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Logs what a step logged; returns what else it returned. RunError for what is no scalar."""
        returned = {}
        for name, options in self.options[next(iter(call))].items():
            if options is not None and name in outputs:  # other kinds of batches may log other names
                self.module.log(name.removeprefix("log "), outputs[name], **options)
            elif options is None and name not in outputs:
                raise RunError(f"training_step returns {name}, which is no scalar; return it from a validation_step")
            elif options is None:
                returned[name] = outputs[name]
        return returned

    def _while_captured(self) -> type[LightningModule]:
        """The module's class in a capture: what a capture would take for the same in each step is refused."""
        plain: Any = self.plain

        def log(module: Any, name: str, value: Any, *args: Any, **options: Any) -> None:
            is_tensor, is_proxy = isinstance(value, Tensor), isinstance(value, torch.fx.Proxy)
            if not (is_tensor or is_proxy) or (is_proxy and value.node.target == "item"):
                self.refuse(f"self.log({name!r}) is given a number", "log a tensor: a mean over rows, or a count")
            names = list(inspect.signature(LightningModule.log).parameters)[3:]
            options |= dict(zip(names, args, strict=False))
            options.pop("batch_size", None)  # of a micro-batch; Lightning counts the batch
            self._outputs[f"log {name}"] = value.detach().reshape(())
            self._options[f"log {name}"] = options

        def log_dict(module: Any, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
            for name, value in dictionary.items():
                log(module, name, value, *args, **options)

        def get(module: Any, name: str) -> Any:
            value = plain.__getattr__(module, name)
            if isinstance(value, torch.nn.Module) and any(isinstance(inner, Metric) for inner in value.modules()):
                later = "return what it needs, and call it in on_validation_batch_end(outputs, ...)"
                self.refuse(f"the metric {name} is used", "log a mean over rows" if self._trains else later)
            return value

        def read(what: str) -> Any:
            return lambda *_: self.refuse(f"{what} is read", "use it in a hook, such as on_train_batch_end")

        operators = "add bool eq float floordiv format ge gt hash index int le lt mod mul ne radd rmul str sub truediv"
        methods = {f"__{name}__": read("batch_idx") for name in operators.split()}
        self.batch_index = type("BatchIndex", (), methods)()
        trainer = property(read("self.trainer (current_epoch, global_step, logger)"))
        attributes = {"__getattr__": get, "log": log, "log_dict": log_dict, "_trainer": trainer}
        return type(plain.__name__, (plain,), attributes)
