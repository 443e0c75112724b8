"""What offload costs the host, and which share of a step's saved tensors leaves for the host's memory.

    python examples/benchmarks/offload.py                   # a Llama of transformers; one process plays all ranks
    python examples/benchmarks/offload.py --before FOLDER   # a step without offload, here and in an earlier checkout

A step with offload and the same step without take turns. The cost is the difference of their processor times over the
number of saved tensors that leave: it covers noting them, both copies, and the tensors that autograd gets. Least of all
rounds are told, since other work on the machine only adds. The tensors are small, so that the copies themselves take
next to nothing. Where there is a GPU, a larger Llama follows, and the most memory of its step with offload and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from turns import in_turns, table

import fxpipe

sys.path.insert(0, str(Path(__file__).parents[2]))

MICROBATCHES = 8
WARM_UP = 3


def compiled(schedule: Any, width: int, inputs: dict[str, Tensor]) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(num_hidden_layers=4, vocab_size=64, use_cache=False, attn_implementation="sdpa", **sizes)
    return fxpipe.compile(
        LlamaForCausalLM(config).to(inputs["input_ids"].device),
        fxpipe.Topology([("pipe", 4)]),
        boundaries=[f"model.layers.{layer}" for layer in (1, 2, 3)],
        microbatches=MICROBATCHES,
        schedule=schedule,
        example_kwargs=inputs,
    )


def batch(length: int, device: str) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (MICROBATCHES, length), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}


def processor_times(steps: list[fxpipe.ForwardBackward], inputs: dict[str, Tensor], rounds: int) -> list[list[float]]:
    """The seconds of each step in each round. The steps take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(WARM_UP + rounds):
        for step, of_step in list(zip(steps, times, strict=True))[:: 1 if number % 2 else -1]:
            start = time.process_time()
            step(**inputs)
            of_step.append(time.process_time() - start)
    return [each[WARM_UP:] for each in times]


def saved(step: fxpipe.ForwardBackward, inputs: dict[str, Tensor]) -> tuple[int, int]:
    """The tensors that autograd saves in a step, without parameters, and the bytes of their storages."""
    noted: list[Tensor] = []  # so that no storage takes the address of another
    parameters = {parameter.untyped_storage().data_ptr() for parameter in step.module.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            noted.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step(**inputs)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in noted}
    return len(noted), sum(storages.values())


def most_bytes(step: fxpipe.ForwardBackward, inputs: dict[str, Tensor]) -> int:
    for _ in range(WARM_UP):
        step(**inputs)
    torch.cuda.reset_peak_memory_stats()
    step(**inputs)
    return torch.cuda.max_memory_allocated()


def compare(rounds: int) -> None:
    from tests.offloading import Offloading, leaving  # which earlier checkouts lack

    inputs = batch(8, "cpu")
    steps = [compiled(schedule, 16, inputs) for schedule in ("gpipe", Offloading("gpipe"))]
    plain, offloaded = processor_times(steps, inputs, rounds)
    with leaving() as left:
        steps[1](**inputs)
    tensors, bytes_ = saved(steps[0], inputs)
    leave = sum(each.tensors for each in left)
    cost = (min(offloaded) - min(plain)) / leave
    print(f"saved tensors      {tensors}, of which {leave} leave, in {sum(each.storages for each in left)} storages")
    print(f"their bytes        {bytes_:,}, of which {sum(each.bytes for each in left) / bytes_:.0%} leave")
    print(f"a step             {1e3 * min(plain):.1f} ms, {1e3 * min(offloaded):.1f} with")
    print(f"an offloaded one   {1e6 * cost:.1f} µs")
    if torch.cuda.is_available():
        inputs = batch(2048, "cuda")
        schedules = {"without": "gpipe", "with offload": Offloading("gpipe")}
        rows = [(name, most_bytes(compiled(each, 1024, inputs), inputs)) for name, each in schedules.items()]
        print(tabulate(rows, headers=["", "most bytes of the GPU"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="an earlier checkout")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--plain", action="store_true", help="print the time of a step without offload as JSON")
    arguments = parser.parse_args()
    if arguments.plain:
        inputs = batch(8, "cpu")
        (times,) = processor_times([compiled("gpipe", 16, inputs)], inputs, arguments.rounds)
        print(json.dumps({"ms of a step without offload": 1e3 * statistics.median(times)}))
    elif arguments.before:
        print(table(in_turns(__file__, ["--plain"], arguments.before, rounds=5)))
    else:
        compare(arguments.rounds)


if __name__ == "__main__":
    main()
