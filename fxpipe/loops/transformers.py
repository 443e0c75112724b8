"""transformers' Trainer over a pipeline: ``PipelineTrainer`` takes the place of ``Trainer``.

Logging, callbacks, learning rates, the order of rows, saving and early stopping stay the Trainer's. Overridden names
that begin with an underscore are private to transformers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import EvalLoopOutput

import fxpipe
from fxpipe.batch.batch import Batch
from fxpipe.batch.description import bind, describe
from fxpipe.batch.rows import counts_of
from fxpipe.distributed.processes import process_place
from fxpipe.errors import RunError
from fxpipe.loops.replica_batches import ReplicaBatches, SeededRows, part_of
from fxpipe.run.forward_backward import steps_of
from fxpipe.stage.with_loss import target_of
from fxpipe.torch_compat import pytree

REFUSED = {
    "fp16": "write bf16=True, or pipeline={'precision': fxpipe.Precision(torch.float16)}",
    "deepspeed fsdp": "write pipeline={'zero': 1}, 2 or 3, or 'parallelize'",
    "torch_compile": "write pipeline={'stage_compiler': torch.compile}",
    "gradient_checkpointing": "write pipeline={'recompute': True}",
    "debug neftune_noise_alpha use_liger_kernel": "change the model before, since it is captured",
    "auto_find_batch_size": "give a batch size; fxpipe.preview says what fits",
    "enable_jit_checkpoint": "a signal reaches ranks in different steps; see SLURM in examples/other_loops.md",
    "fp16_full_eval bf16_full_eval parallelism_config torch_empty_cache_steps eval_use_gather_object": "leave it out",
}
"""Arguments of the Trainer that a pipeline cannot honour → what to write instead."""
OVERRIDDEN = "compute_loss prediction_step get_train_dataloader get_eval_dataloader get_test_dataloader".split()


def refused(cls: type[Trainer], args: Any, topo: fxpipe.Topology, given: Mapping[str, Any]) -> list[str]:
    """Returns what of the arguments of a ``cls`` a pipeline cannot do, and what to write instead."""
    config, optim, process = args.accelerator_config, args.optim.value, process_place()
    evaluated = given.get("eval_dataset")
    datasets = [given.get("train_dataset"), *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])]
    unsized = any(each is not None and not hasattr(each, "__len__") for each in datasets)
    takes_model = optim.startswith(("galore", "apollo", "lomo", "adalomo"))
    own = [name for name in OVERRIDDEN if getattr(cls, name) is not getattr(PipelineTrainer, name)]
    launched = [name for name in ("DEEPSPEED", "FSDP") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"]
    others = {
        f"{', '.join(launched)} in Accelerate's configuration: write pipeline={{'zero': 1}}, 2 or 3": launched,
        f"mixed_precision={args.mixed_precision}: write bf16=True": args.mixed_precision not in ("no", "bf16"),
        f"optim={optim}: it takes a whole model, write another": takes_model,
        "train_sampling_strategy: write 'random' or 'sequential'": args.train_sampling_strategy[:3] not in "ran seq",
        "split_batches, dispatch_batches: a replica draws its rows": config.split_batches or config.dispatch_batches,
        "load_best_model_at_end, save_only_model: leave one out": args.save_only_model and args.load_best_model_at_end,
        "model_init: write model=, which is compiled once": given.get("model_init"),
        "optimizers: write optimizer_cls_and_kwargs=, since ranks step parts": any(given.get("optimizers", ())),
        "compute_loss_func: write pipeline={'loss_fn': f}, called as f(output, labels)": given.get("compute_loss_func"),
        "label_smoothing_factor: smooth in loss_fn": args.label_smoothing_factor and "loss_fn" in given["pipeline"],
        f"{', '.join(own)}, overridden: write pipeline={{'loss_fn': f}}, or override _get_train_sampler": own,
        "a dataset without __len__: replicas could not divide its rows": unsized,
        "a context axis: write a loop as in examples/axes.md": topo.size("context") > 1,
        "processes that Accelerate does not see: start them with torchrun": args.world_size < (process or (0, 1))[1],
    }
    each = ((name, instead) for names, instead in REFUSED.items() for name in names.split())
    named = [f"{name}: {instead}" for name, instead in each if getattr(args, name, None)]
    return named + [text for text, applies in others.items() if applies]


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` whose model runs as a pipeline.

    ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are rows of a replica. A step has the rows that
    the Trainer in one process draws with ``topo.data_size`` times as many. Its loss is over all labels of the step; the
    batches of ``gradient_accumulation_steps`` are more micro-batches of it. With ``bf16`` parameters are rounded, and
    saved so, and masters are float32. With a ``loss_fn`` or smoothed labels, metrics cost a second evaluation.

    Args:
        model: as the Trainer's.
        args: as the Trainer's.
        topo: the ranks.
        pipeline: options of ``fxpipe.compile``; without ``example_kwargs``, the example is rows of ``train_dataset``.
        **others: the Trainer's other arguments.

    Raises:
        RunError: a pipeline cannot honour some of the arguments; the message lists all of them.
    """

    optimizer: Any
    _created_lr_scheduler: bool

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        topo: fxpipe.Topology,
        pipeline: Mapping[str, Any],
        **others: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        _join(args)
        if what := refused(type(self), args, topo, {**others, "pipeline": pipeline}):
            raise RunError("\n  ".join([f"PipelineTrainer cannot do {len(what)} of what it is given:", *what]))
        self.topo, self._waiting, self._saved = topo, list[Any](), set[Path]()
        super().__init__(model, args, **others)
        options = {"precision": fxpipe.Precision() if args.mixed_precision == "bf16" else None, **pipeline}
        if self.label_smoother is not None:
            options["loss_fn"] = self._smoothed
        self._loss_fn, self._batch_dim = options.get("loss_fn"), options.get("batch_dim", 0)
        if self._loss_fn is None and not _reads_number(self.model):
            options.setdefault("loss_weight", self._labels_in)
        if self.train_dataset is not None and not {"example_args", "example_kwargs"} & options.keys():
            rows = list(range(min(len(self.train_dataset), self._train_batch_size)))
            (example,) = self.get_train_dataloader().dataset.__getitems__((0, rows))
            options["example_kwargs"] = self._prepare_inputs(example)
        if "example_kwargs" in options:
            options["example_kwargs"] = self._with_target(options["example_kwargs"])
        self.model.train()
        self.forward_backward = fxpipe.compile(self.model, topo, **options)
        self._microbatches = self.forward_backward.schedule.microbatches
        self._steps = steps_of(self.forward_backward)
        self._leads = args.process_index in [ranks[0] for ranks in topo.groups("model")]

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    # the rows

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any, is_training: bool = False, **others: Any
    ) -> DataLoaderShard:
        """The Trainer's loader, with this replica's rows of its batches."""
        plain = super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training)
        args, topo, sharded = self.args, self.topo, plain.batch_sampler
        sampler = getattr(sharded, "batch_sampler", sharded).sampler
        seed = args.seed if args.data_seed is None else args.data_seed
        if hasattr(sampler, "initial_seed"):
            sampler.initial_seed = seed  # what torch.initial_seed() is, unless some code has seeded anew
        size, steps = batch_size * topo.data_size, args.gradient_accumulation_steps if is_training else 1
        options = {name: getattr(plain, name) for name in ("num_workers", "pin_memory", "prefetch_factor")}
        return DataLoaderShard(
            SeededRows(plain.dataset, plain.collate_fn, seed),
            batch_sampler=ReplicaBatches(
                sampler, size, args.dataloader_drop_last, topo.data_rank, topo.data_size, seed, steps
            ),
            collate_fn=operator.itemgetter(0),
            multiprocessing_context=plain.multiprocessing_context,
            persistent_workers=plain.persistent_workers and is_training,
            **options,
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The rows of a step, over all replicas."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.topo.data_size)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Those of a replica, on one of its ranks: the Trainer adds up all ranks'."""
        return int(super().floating_point_ops(inputs)) if self._leads else 0

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        super()._track_num_input_tokens(inputs if self._leads else {name: value[:0] for name, value in inputs.items()})

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> None:
        """fxpipe counts the labels of a step by itself."""

    # a step

    def _with_target(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a call, with the labels as the target of ``loss_fn``."""
        has_target = target_of(self._loss_fn) is not None
        if not has_target:
            self._names = list(bind(inspect.signature(self.model.forward), (), inputs))
        return {"target" if has_target and name == "labels" else name: value for name, value in inputs.items()}

    def _smoothed(self, output: Any, target: Tensor) -> fxpipe.Sum:
        """The Trainer's smoothed loss, over all labels of the step."""
        model = getattr(self.model, "get_base_model", lambda: self.model)()
        shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        total = self.label_smoother(output, target, shift_labels=shifts, num_items_in_batch=1)
        return fxpipe.Sum(total, ((target[..., 1:] if shifts else target) != self.label_smoother.ignore_index).sum())

    def _labels_in(self, *inputs: Any) -> int:
        """The labels of a micro-batch, or its rows: its weight if the loss does not read the number of all labels."""
        labels: Any = dict(zip(self._names, inputs, strict=False)).get("labels")
        is_given = isinstance(labels, Tensor) and len(inputs) == len(self._names)  # no labels where it predicts
        return int(torch.ne(labels, -100).sum()) if is_given else len(inputs[0])

    def create_optimizer(self, model: Any = None) -> Any:
        """The Trainer's optimizer and its two groups, of which each rank steps its part."""
        if self.optimizer is None:
            cls, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decayed = set(self.get_decay_parameter_names(self.model))
            groups: list[dict[str, Any]] = [
                {"params": lambda name, p: p.requires_grad and name in decayed, "weight_decay": self.args.weight_decay},
                {"params": lambda name, p: p.requires_grad and name not in decayed, "weight_decay": 0.0},
            ]
            named = list(self._steps.module.named_parameters())
            chosen = [group for group in groups if any(itertools.starmap(group["params"], named))]
            self.optimizer = self.forward_backward.optimizer(cls, chosen, **options)
        return self.optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Wraps nothing: neither the model in DDP nor the optimizer and the loader by Accelerate."""
        self._waiting = []
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer_and_scheduler(max_steps)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint, "pipeline")
            fxpipe.load(folder, self.forward_backward, self.optimizer, scheduler=self.lr_scheduler)
        self.model_wrapped = self.forward_backward
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.forward_backward, train_dataloader

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs the step, with the micro-batches of all its batches, once the last has come; until then, returns 0."""
        self._waiting.append(self._with_target(self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        if callable(train := getattr(self.optimizer, "train", None)):  # of a schedule-free optimizer
            train()
        parts = [self._parts_of(batch) for batch in batches]
        if list(map(len, parts)) == [self._microbatches]:
            return self.forward_backward(**batches[0])
        return self.forward_backward.step_microbatches([((), part) for batch in parts for part in batch])

    def _parts_of(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """A batch's micro-batches, equally many on all replicas: fewer if it has fewer rows."""
        split = functools.partial(
            Batch.from_descriptions, [describe(inputs)], [counts_of(inputs, self._batch_dim)], self._batch_dim
        )
        rows = min(self._steps.transport.gather_int("data", split(1).rows or self._microbatches))
        # a batch of which each replica has all rows is larger than the others
        most = self._microbatches * -(-rows // self._train_batch_size)
        return split(min(most, rows)).split([inputs])

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.forward_backward.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self.forward_backward.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # evaluation

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.forward_backward if training else functools.partial(self.forward_backward.evaluate, outputs="all")

    def evaluation_loop(self, dataloader: Any, *others: Any, **options: Any) -> EvalLoopOutput:
        """The Trainer's loop: each replica evaluates its rows, and each row's predictions are there once."""
        self._left = len(dataloader.dataset)
        self.gather_function = functools.partial(pytree.tree_map_only, Tensor, self._over_replicas)
        return super().evaluation_loop(dataloader, *others, **options)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss over the rows of all replicas, and this replica's logits and labels."""
        self._loss_only = prediction_loss_only
        self._rows = min(self.args.eval_batch_size * self.topo.data_size, self._left)
        self._left -= self._rows
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> tuple[Tensor, Any]:
        """The loss of an evaluation, over the rows of all replicas."""
        inputs, outputs = self._with_target(inputs), {}
        if is_apart := self._loss_only or self._loss_fn is not None:
            loss = self.forward_backward.evaluate(**inputs, outputs="loss")
        if not self._loss_only:
            inputs.pop("target", None)
            outputs = model(**inputs)
        return loss if is_apart else outputs["loss"] if isinstance(outputs, dict) else outputs[0], outputs

    def _over_replicas(self, values: Tensor) -> Tensor:
        """The rows of all replicas, in the dataset's order, of a tensor with this replica's rows."""
        mine = part_of(self._rows, self.topo.data_rank, self.topo.data_size)
        rows = len(range(self._rows)[mine])
        if values.dim() == 1 and len(values) != rows:  # a loss, repeated for each row of a full batch
            values = values[:1].repeat(rows)
        if rows == self._rows or not values.dim():
            return values
        whole = values.new_zeros(self._rows, *values.shape[1:])
        whole[mine] = values
        # A sum of bytes and zeros rounds nothing.
        self._steps.transport.all_reduce("data", whole.view(-1).view(torch.uint8))
        return whole

    # checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, as ``save_pretrained`` does. A collective call."""
        self._save(output_dir, state_dict=self.forward_backward.state_dict(full=True))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, step = Path(output_dir, "pipeline"), self.state.global_step
        if folder not in self._saved and self.is_world_process_zero():
            shutil.rmtree(folder, ignore_errors=True)  # an earlier run's, over which the Trainer writes
        self._saved.add(folder)
        fxpipe.save(folder, self.forward_backward, self.optimizer, step=step, scheduler=self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """``_prepare_for_training`` does it; RunError if it could not."""
        if not Path(resume_from_checkpoint, "pipeline").is_dir():
            raise RunError(
                f"{resume_from_checkpoint} has no folder pipeline, which a PipelineTrainer writes; to go on from what "
                "a plain Trainer wrote, give the model that from_pretrained reads from it, and do not resume"
            )

    def _load_best_model(self) -> None:
        fxpipe.load(Path(self.state.best_model_checkpoint, "pipeline"), self.forward_backward)


def _reads_number(model: Any) -> bool:
    """Whether the loss of a model of transformers may read ``num_items_in_batch``."""
    base = getattr(model, "get_base_model", lambda: model)()
    named = inspect.unwrap(type(base).forward).__code__.co_names
    return "loss_function" in named and getattr(base, "accepts_loss_kwargs", True)


def _join(args: TrainingArguments) -> None:
    """Starts torch.distributed, and has Accelerate see all processes, on CPUs, too."""
    device, process = fxpipe.init(device="cpu") if args.use_cpu else fxpipe.init(), process_place()
    if process is not None and args.world_size != process.world_size:
        names = ("rank", "local_rank", "world_size")
        os.environ.update({name.upper(): str(getattr(process, name)) for name in names})
        args.use_cpu, args.dataloader_pin_memory = device.type == "cpu", device.type != "cpu"
        vars(args).pop("_setup_devices", None)
        args.device  # noqa: B018  # sets it up anew
    vars(args)["_n_gpu"] = min(args.n_gpu, 1)  # one process is one replica, whichever GPUs it sees
