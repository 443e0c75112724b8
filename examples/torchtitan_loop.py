"""torchtitan over a pipeline: its Trainer's configuration, model, loss, optimizer, schedule and data; fxpipe's step.

    python examples/torchtitan_loop.py                               # one process plays both stages
    torchrun --nproc-per-node 4 examples/torchtitan_loop.py          # two stages, two replicas
    python examples/torchtitan_loop.py --plain                       # torchtitan's own forward, backward and optimizer

Needs torchtitan 0.3.0 and triton, which all of its models import. ``PipelineTrainer`` is its Trainer with another
``__init__``, ``train_step`` and ``train``: they name a GPU (``set_device``, ``set_pg_timeouts``). Its attention on
documents (flex, varlen) has no backward on a CPU, so that here it is ``ScaledDotProductAttention``. A fused ``wqkv`` is
split when it is saved, by a hook, for which a rank would need other ranks' values: ``fuse_qkv=False``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from tempfile import mkdtemp

import torch
from torch import Tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import fxpipe


class Counting(BaseDataLoader):
    """Numbers that count up from somewhere; a rank's rows are those of its data rank, and some labels are ignored."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, rows: int, seq_len: int) -> None:
        self.rank, self.ranks, self.rows, self.length, self.drawn = dp_rank, dp_world_size, rows, seq_len, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.drawn)
            starts = torch.randint(64, (self.ranks * self.rows, 1), generator=generator)
            tokens = ((starts + torch.arange(self.length + 1)) % 64)[self.rank :: self.ranks]
            self.drawn += 1
            yield {"input": tokens[:, :-1]}, torch.where(tokens[:, 1:] % 5 == 0, IGNORE_INDEX, tokens[:, 1:])

    any_replicas = True  # the state counts batches of the whole run

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.drawn = state_dict["drawn"]


class PipelineTrainer(Trainer):
    """torchtitan's Trainer, whose step is ``forward_backward``; ``plain``: its own, on one device, to compare with."""

    def __init__(self, config: Trainer.Config, plain: bool = False) -> None:
        self.config, parallelism = config, config.parallelism
        self.device = fxpipe.init(timeout=config.comm.init_timeout_seconds)
        pipe = parallelism.pipeline_parallel_degree
        ranks = 1 if plain else max(pipe, int(os.environ.get("WORLD_SIZE", 1)))
        self.parallel_dims = dims = ParallelDims.from_config(parallelism, ranks)
        topo = fxpipe.Topology([("pipe", dims.pp), ("data", dims.dp_replicate * dims.dp_shard)])  # torchtitan's order
        spec = config.model_spec
        spec.model.update_from_config(config=config)
        torch.manual_seed(config.debug.seed or 0)
        with torch.device("meta"):
            model = spec.model.build()
        model.to_empty(device=self.device)
        model.init_weights(buffer_device=None)
        model.train()
        self.model_config, self.model_parts = spec.model, [model]
        self.loss_fn = config.loss.build(compile_config=config.compile)
        rows, replicas = config.training.local_batch_size, topo.data_size
        total = config.training.global_batch_size
        self.gradient_accumulation_steps = max(total, rows * replicas) // (rows * replicas)
        self.dataloader = config.dataloader.build(
            dp_rank=topo.data_rank, dp_world_size=replicas, rows=rows, seq_len=config.training.seq_len
        )
        if plain:
            self.optimizers = config.optimizer.build(model_parts=self.model_parts)
        else:
            self._compile(model, topo)
        self.lr_schedulers = config.lr_scheduler.build(
            optimizers=self.optimizers if plain else [self.optimizers], training_steps=config.training.steps
        )
        self.step = self.ntokens_seen = 0

    def _compile(self, model: torch.nn.Module, topo: fxpipe.Topology) -> None:
        tokens = torch.zeros(self._rows, self.config.training.seq_len, dtype=torch.int64, device=self.device)
        middle = len(model.layers) // topo.size("pipe")
        self.forward_backward = fxpipe.compile(
            model,
            topo,
            boundaries=[f"layers.{number}" for number in range(middle, len(model.layers), middle)],
            microbatches=self._rows // self.config.parallelism.pipeline_parallel_microbatch_size,
            loss_fn=self._loss,
            example_args=(tokens,),
            example_kwargs={"target": tokens},
        )
        (kind,) = {group.optimizer_name for group in self.config.optimizer.param_groups}
        groups, taken = [], "$^"
        for group in self.config.optimizer.param_groups:  # the first pattern that matches takes a parameter
            first, others = re.compile(group.pattern), re.compile(taken)
            taken = f"{taken}|{group.pattern}"
            names = [name for name, _ in model.named_parameters() if first.search(name) and not others.search(name)]
            groups.append({"params": names, **group.optimizer_kwargs})
        self.optimizers = self.forward_backward.optimizer(getattr(torch.optim, kind), groups)

    @property
    def _rows(self) -> int:
        return self.config.training.local_batch_size * self.gradient_accumulation_steps

    def _loss(self, prediction: Tensor, labels: Tensor) -> fxpipe.Sum:
        """torchtitan's sum over the tokens, and their number: the mean over all ranks' tokens is exact."""
        total, _ = self.loss_fn(prediction, labels)
        return fxpipe.Sum(total, (labels != IGNORE_INDEX).sum())

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> float:
        self.optimizers.zero_grad()
        drawn = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        tokens = torch.cat([inputs["input"] for inputs, _ in drawn]).to(self.device)
        labels = torch.cat([labels for _, labels in drawn]).to(self.device)
        self.ntokens_seen += labels.numel()
        if hasattr(self, "forward_backward"):
            loss = self.forward_backward(tokens, target=labels)  # in place of forward_backward_step, for all of them
            self.forward_backward.clip_grad_norm_(self.config.training.max_norm)
        else:
            loss, _ = self.loss_fn(self.model_parts[0](tokens), labels, (labels != IGNORE_INDEX).sum())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), self.config.training.max_norm)
        self.optimizers.step()
        self.lr_schedulers.step()
        return loss.item()

    def train(self) -> list[float]:
        """The losses from the newest checkpoint on."""
        losses, saves = [], self.config.checkpoint.enable and hasattr(self, "forward_backward")
        parts = {"scheduler": self.lr_schedulers, "loader": self.dataloader}
        folder = os.path.join(self.config.dump_folder, self.config.checkpoint.folder)
        if saves:
            loaded = fxpipe.load(folder, self.forward_backward, self.optimizers, required=False, **parts)
            self.load_state_dict({"step": loaded["step"], "ntokens_seen": loaded.get("ntokens_seen", 0)})
        data = iter(self.dataloader)
        while self.should_continue_training():
            self.step += 1
            losses.append(self.train_step(data))
            if saves and self.step % self.config.checkpoint.interval == 0:
                extra = {"ntokens_seen": self.ntokens_seen}
                fxpipe.save(folder, self.forward_backward, self.optimizers, step=self.step, extra=extra, **parts)
        return losses


def configuration(folder: str, replicas: int, steps: int = 8, plain: bool = False) -> Trainer.Config:
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:4]
    for layer in spec.model.layers:
        layer.attention = make_gqa_config(
            dim=spec.model.dim,
            n_heads=layer.attention.n_heads,
            wqkv_param_init={"weight": partial(torch.nn.init.trunc_normal_, std=0.02)},
            wo_param_init=layer.attention.wo.param_init,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=layer.attention.rope,
            fuse_qkv=False,
        )
    optimizer = default_adamw(lr=1e-3)
    optimizer.implementation = "for-loop"
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        dataloader=Counting.Config(),
        training=TrainingConfig(
            local_batch_size=4 // replicas, global_batch_size=8, seq_len=32, steps=steps, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=1 if plain else 2,
            data_parallel_replicate_degree=replicas,
            data_parallel_shard_degree=1,
            pipeline_parallel_microbatch_size=1,
        ),
        checkpoint=CheckpointManager.Config(enable=not plain, interval=4),
    )


def main(folder: str | None = None, steps: int = 8, plain: bool = False) -> list[float]:
    torch.set_num_threads(1)
    replicas = 1 if plain else max(1, int(os.environ.get("WORLD_SIZE", 1)) // 2)
    return PipelineTrainer(configuration(folder or mkdtemp(), replicas, steps, plain), plain).train()


if __name__ == "__main__":
    for step, loss in enumerate(main(plain="--plain" in sys.argv), start=1):
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: loss {loss:.4f}")
