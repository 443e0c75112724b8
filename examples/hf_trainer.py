"""transformers' Trainer over a pipeline: see loops_transformers.md.

    python examples/hf_trainer.py                                 # one process plays both stages
    torchrun --nproc-per-node 4 examples/hf_trainer.py            # two stages, two replicas

A small Llama with random weights learns to count; nothing is downloaded. The script needs fxpipe[transformers].
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import fxpipe
from fxpipe.loops.transformers import PipelineTrainer


def counting(rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Numbers that count up from somewhere, modulo 32."""
    starts = torch.randint(32, (rows,), generator=torch.Generator().manual_seed(seed))
    ids = (starts[:, None] + torch.arange(16)) % 32
    return [{"input_ids": row, "labels": row} for row in ids]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))


def accuracy(evaluated: Any) -> dict[str, float]:
    """The share of held-out numbers that are right."""
    right = evaluated.predictions[:, :-1] == evaluated.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


def main(folder: str = "hf_trainer_output", epochs: int = 6) -> PipelineTrainer:
    torch.set_num_threads(1)
    fxpipe.init()
    replicas = max(1, int(os.environ.get("WORLD_SIZE", 1)) // 2)
    args = TrainingArguments(
        folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=32 // replicas,
        num_train_epochs=epochs,
        learning_rate=1e-2,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = PipelineTrainer(
        model=llama(),
        args=args,
        train_dataset=counting(512, seed=1),
        eval_dataset=counting(50, seed=2),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        topo=fxpipe.Topology([("data", replicas), ("pipe", 2)]),
        pipeline={"boundaries": ["model.layers.1"], "microbatches": 4},
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    found = main().evaluate()
    if os.environ.get("RANK", "0") == "0":
        print(f"held-out rows: loss {found['eval_loss']:.3f}, accuracy {found['eval_accuracy']:.2f}")
