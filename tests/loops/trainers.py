"""What the tests of transformers' Trainer train: a plain Trainer in one process, and a pipeline's on any ranks.

Functions import transformers, which takes seconds, when they are called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fxpipe

ROWS, HELD_OUT, LENGTH, WORDS = 101, 37, 16, 32
"""Rows of the two datasets: neither is a multiple of a batch or of the replicas."""
BATCH, EVAL_BATCH = 16, 8
"""Over all replicas."""


@dataclass(frozen=True)
class Scenario:
    """What both trainers are given. ``chosen``: whether metrics get the largest logits' places alone. ``early``: the
    patience of an EarlyStoppingCallback. ``predicts``: whether it predicts and writes the model at the end."""

    options: dict[str, Any] = field(default_factory=dict)
    metrics: Any = None
    chosen: bool = False
    collate: Any = None
    early: int | None = None
    resume: Any = None
    model: str = "llama"
    rows: int = ROWS
    held_out: int = HELD_OUT
    predicts: bool = True
    folder: str = ""


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))


def frozen() -> Any:
    """A Llama of which nothing is trained that has no weight decay."""
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() > 1)
    return model


def bert() -> Any:
    """Its loss ignores ``num_items_in_batch``."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": LENGTH}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes, **drops))


MODELS = {
    "llama": (llama, "model.layers.1"),
    "frozen": (frozen, "model.layers.1"),
    "bert": (bert, "bert.encoder.layer.1"),
}
"""Name → the function that makes it, and where it is cut."""


def counting(rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Numbers that count up from somewhere, modulo 32, with labels for a random part of each row."""
    generator, places = torch.Generator("cpu").manual_seed(seed), torch.arange(LENGTH, device="cpu")
    starts = torch.randint(WORDS, (rows,), generator=generator, device="cpu")
    ends = torch.randint(4, LENGTH, (rows,), generator=generator, device="cpu")
    ids = (starts[:, None] + places) % WORDS
    labels = ids.masked_fill(places >= ends[:, None], -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def masked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch whose words are replaced at random, by the global generators."""
    ids = torch.stack([row["input_ids"] for row in rows])
    hidden = torch.rand(ids.shape, device="cpu") < 0.3
    return {"input_ids": ids.masked_fill(hidden, int(np.random.randint(WORDS))), "labels": ids}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of rows that end where their labels end, as long as the longest of them; without labels, as they are."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "labels" in batch:
        batch["attention_mask"] = (batch["labels"] != -100).long()
        batch["input_ids"] *= batch["attention_mask"]
        length = int(batch["attention_mask"].sum(dim=1).max())
        batch = {name: value[:, :length] for name, value in batch.items()}
    return batch


def accuracy(predicted: Any) -> dict[str, float]:
    """The share of labels that are predicted, and a number that depends on the order of the rows."""
    found = predicted.predictions
    words = (found.argmax(-1) if found.ndim == 3 else found)[:, :-1]
    labels = predicted.label_ids[:, 1:]
    order = (np.arange(len(labels))[:, None] * (labels + 100)).sum()
    return {"accuracy": float((words == labels)[labels != -100].mean()), "rows": len(labels), "order": float(order)}


class Batchwise:
    """Rows and labels of an evaluation whose metrics are told batch by batch."""

    def __init__(self) -> None:
        self.seen = [0.0, 0.0]

    def __call__(self, predicted: Any, compute_result: bool) -> dict[str, float]:
        self.seen[0] += len(predicted.label_ids)
        self.seen[1] += float(predicted.label_ids.sum())
        rows, labels = self.seen
        if compute_result:
            self.seen = [0.0, 0.0]
        return {"rows": rows, "labels": labels}


def largest(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


def given(scenario: Scenario, replicas: int) -> dict[str, Any]:
    """The arguments of a Trainer."""
    from transformers import EarlyStoppingCallback, TrainingArguments

    options = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        **scenario.options,
    }
    sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": EVAL_BATCH}
    sizes = {name: size // replicas for name, size in sizes.items()}
    args = TrainingArguments(scenario.folder, **sizes, **options)
    vars(args)["_n_gpu"] = min(args.n_gpu, 1)  # a plain Trainer would put its model on all GPUs, by DataParallel
    return {
        "model": MODELS[scenario.model][0](),
        "args": args,
        "train_dataset": counting(scenario.rows, seed=1),
        "eval_dataset": counting(scenario.held_out, seed=2),
        "data_collator": scenario.collate,
        "compute_metrics": scenario.metrics,
        "preprocess_logits_for_metrics": largest if scenario.chosen else None,
        "callbacks": [] if scenario.early is None else [EarlyStoppingCallback(scenario.early)],
    }


@dataclass(frozen=True)
class Trained:
    """What a Trainer has come to. ``parameters``: of the model that ``save_model`` has written."""

    history: list[dict[str, float]]
    predictions: Any
    parameters: dict[str, Tensor]
    best: Any
    tokens: int


def results(trainer: Any, scenario: Scenario) -> Trained:
    trainer.train(resume_from_checkpoint=scenario.resume)
    state, predictions, parameters = trainer.state, np.zeros(0), {}
    best = state.best_metric, Path(state.best_model_checkpoint or "").name
    if scenario.predicts:
        unlabelled = [{"input_ids": row["input_ids"]} for row in counting(7, seed=3)]
        predictions = trainer.predict(unlabelled).predictions
        folder = Path(scenario.folder, "at the end")
        trainer.save_model(str(folder))
    if scenario.predicts and trainer.is_world_process_zero():
        written = type(trainer.model).from_pretrained(folder, dtype="auto")
        parameters = {name: parameter.detach().cpu() for name, parameter in written.named_parameters()}
    return Trained(state.log_history, predictions, parameters, best, state.num_input_tokens_seen)


def plainly(scenario: Scenario) -> Trained:
    from transformers import Trainer

    return results(Trainer(**given(scenario, 1)), scenario)


def piped(scenario: Scenario, **pipeline: Any) -> Trained:
    """By a pipeline of two stages, with as many replicas as there are ranks for."""
    from fxpipe.loops.transformers import PipelineTrainer

    torch.set_num_threads(1)
    replicas = max(1, int(os.environ.get("WORLD_SIZE", 1)) // 2)
    topo = fxpipe.Topology([("data", replicas), ("pipe", 2)])
    cut = {"boundaries": [MODELS[scenario.model][1]], "microbatches": 4, "tracer": "export", **pipeline}
    return results(PipelineTrainer(topo=topo, pipeline=cut, **given(scenario, replicas)), scenario)
