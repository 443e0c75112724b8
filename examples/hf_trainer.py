"""transformers' Trainer over a pipeline: a subclass, in which fxpipe makes the step, the batches and the checkpoints.

    python examples/hf_trainer.py                                 # one process plays both stages
    torchrun --nproc-per-node 4 examples/hf_trainer.py            # two stages, two replicas

Logging, callbacks, learning rates, evaluation, early stopping and the order of things stay the Trainer's. A small
Llama with random weights learns to count; nothing is downloaded. The script needs transformers and accelerate.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import EvalLoopOutput

import fxpipe


class SetEpoch(TrainerCallback):
    """The sampler's order is drawn anew in each epoch."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.trainer.sampler.set_epoch(int(state.epoch or 0))


class PipelineTrainer(Trainer):
    """A Trainer whose step is ``forward_backward``. ``per_device_train_batch_size`` is of a replica.

    Args:
        topo: the ranks.
        pipeline: options of ``fxpipe.compile``.
        **kw: the Trainer's own.
    """

    def __init__(self, *, topo: fxpipe.Topology, pipeline: dict[str, Any], **kw: Any) -> None:
        super().__init__(**kw)
        if self.args.gradient_accumulation_steps > 1:
            raise ValueError("a batch is accumulated as micro-batches: write pipeline={'microbatches': n} instead")
        if self.compute_metrics or self.args.fp16 or self.args.bf16:
            raise ValueError("metrics come out of the model, and precision from pipeline={'precision': ...}")
        if self.compute_loss_func is not None or type(self).compute_loss is not Trainer.compute_loss:
            raise ValueError("a loss of your own is a part of the step: write pipeline={'loss_fn': ...} instead")
        if self.label_smoother is not None:
            example = self._with_target(pipeline["example_kwargs"])
            pipeline = {**pipeline, "loss_fn": self._smoothed, "example_kwargs": example}
        self.topo = topo
        self.forward_backward = fxpipe.compile(self.model, topo, **pipeline)
        self.sampler = topo.sampler(self.train_dataset, shuffle=True, seed=self.args.seed, drop_last=True)
        self.add_callback(SetEpoch(self))

    # label smoothing

    def _with_target(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model is given for its logits, and the labels for ``_smoothed``."""
        if self.label_smoother is None:
            return inputs
        return {**{name: value for name, value in inputs.items() if name != "labels"}, "target": inputs["labels"]}

    def _smoothed(self, output: Any, target: Tensor) -> fxpipe.Sum:
        """The Trainer's smoothed loss, over all labels of the batch."""
        shifts = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        total = self.label_smoother(output, target, shift_labels=shifts, num_items_in_batch=1)
        counted = target[..., 1:] if shifts else target
        return fxpipe.Sum(total, (counted != self.label_smoother.ignore_index).sum())

    # what it draws

    def get_train_dataloader(self) -> DataLoader[Any]:
        size = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, size, sampler=self.sampler, collate_fn=self.data_collator, drop_last=True)

    def get_eval_dataloader(self, eval_dataset: Dataset[Any] | None = None) -> DataLoader[Any]:
        """All rows on every replica, so that a loss is the same number everywhere, and no row counts twice."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return DataLoader(dataset, self.args.per_device_eval_batch_size, collate_fn=self.data_collator)

    # a step

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decayed = set(self.get_decay_parameter_names(self.model))
            groups = [
                {"params": lambda name, _: name in decayed, "weight_decay": self.args.weight_decay},
                {"params": lambda name, _: name not in decayed, "weight_decay": 0.0},
            ]
            self.optimizer = self.forward_backward.optimizer(cls, groups, **options)
        return self.optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Nothing is wrapped: neither the model in DDP nor the optimizer and the loader by accelerate."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint, "pipeline")
            fxpipe.load(folder, self.forward_backward, self.optimizer, scheduler=self.lr_scheduler)
        self.model_wrapped = self.forward_backward
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = train_dataloader
        return self.forward_backward, train_dataloader

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """fxpipe counts the labels of the whole batch by itself."""
        return self.forward_backward(**self._with_target(self._prepare_inputs(inputs)))

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.forward_backward.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self.forward_backward.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *others: Any, metric_key_prefix: str = "eval", **options: Any
    ) -> EvalLoopOutput:
        """The mean of the batches' losses, by rows, the same on every rank."""
        total, rows = 0.0, 0
        for inputs in dataloader:
            here = len(next(iter(inputs.values())))
            inputs = self._with_target(self._prepare_inputs(inputs))
            output = self.forward_backward.evaluate(**inputs, outputs="all")
            loss = output.total / output.count if isinstance(output, fxpipe.Sum) else output["loss"]
            total, rows = total + loss.item() * here, rows + here
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": total / rows}, rows)

    # checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The plain model, as ``save_pretrained`` writes it. A collective call."""
        self._save(output_dir, state_dict=self.forward_backward.state_dict(full=True))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir, "pipeline")
        fxpipe.save(
            folder, self.forward_backward, self.optimizer, step=self.state.global_step, scheduler=self.lr_scheduler
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Done by ``_prepare_for_training``."""


def counting(rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Numbers that count up from somewhere, modulo 32."""
    starts = torch.randint(32, (rows,), generator=torch.Generator().manual_seed(seed))
    ids = (starts[:, None] + torch.arange(16)) % 32
    return [{"input_ids": row, "labels": row} for row in ids]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))


def arguments(folder: str, rows: int, epochs: int, **others: Any) -> TrainingArguments:
    """``rows``: of a replica's batch."""
    return TrainingArguments(
        folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=rows,
        num_train_epochs=epochs,
        learning_rate=1e-2,
        weight_decay=0.01,
        logging_steps=10,
        eval_steps=30,
        save_steps=30,
        report_to=[],
        disable_tqdm=True,
        **{"eval_strategy": "steps", **others},
    )


def main(folder: str | None = None, epochs: int = 6, resume: bool = False, **others: Any) -> PipelineTrainer:
    """``others``: more of the Trainer's arguments."""
    torch.set_num_threads(1)
    fxpipe.init()
    replicas = max(1, int(os.environ.get("WORLD_SIZE", 1)) // 2)
    example = torch.zeros(16, 16, dtype=torch.int64)
    trainer = PipelineTrainer(
        topo=fxpipe.Topology([("data", replicas), ("pipe", 2)]),
        pipeline={
            "boundaries": ["model.layers.1"],
            "microbatches": 4,
            "example_kwargs": {"input_ids": example, "labels": example},
        },
        model=llama(),
        args=arguments(folder or mkdtemp(), 32 // replicas, epochs, **others),
        train_dataset=counting(512, seed=1),
        eval_dataset=counting(50, seed=2),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    print(f"loss on held-out rows: {main().evaluate()['eval_loss']:.3f}")
