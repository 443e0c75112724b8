"""What compiling takes: seconds and memory over the number of nodes, stages and actions, with the exponent of each.

    python examples/benchmarks/compile_cost.py                      # all of it, some minutes
    python examples/benchmarks/compile_cost.py actions --json figures.json
    python examples/benchmarks/compile_cost.py --models             # by phase, to the first step: GPT-2, CLIP, a Llama

Each point is a process of its own, forked from one that has imported everything; memory is what it takes beyond that,
and seconds are the processor's, which other processes disturb less; the one thread that compiles never sleeps.
``nodes``: residual blocks of three nodes, cut in two, through `fxpipe.compile`, by each tracer. ``stages``: 1,024 such
blocks in that many stages, each on a rank of its own, or all on four. ``actions``: tables of a chain, generated,
verified, lowered, printed, and bound with a model of four stages in one process. The exponent is the slope of a
straight line through the logarithms of the last three sizes.

``--models`` builds GPT-2 124M and a Llama of 32 layers on the meta device, where no step can be run, and CLIP ViT-L/14
with random weights, of which a step is run.
"""

import argparse
import contextlib
import gc
import importlib
import io
import json
import math
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.schedules import build
from fxpipe.schedules.lower import lower

Figures = dict[str, float]
PHASES = {
    "trace": ("fxpipe.trace", "_traced"),
    "passes": ("fxpipe.capture.examining", "chain"),
    "cut": ("fxpipe.passes", "split"),
    "check": ("fxpipe.capture.capturing", "check"),
    "costs": ("fxpipe.search.choose", "costs_from_shapes"),
    "search": ("fxpipe.search.choose", "balance"),
    "table": ("fxpipe.plan.tables", "make_table"),
    "lower": ("fxpipe.plan.plans", "lower"),
    "prove": ("fxpipe.plan.plans", "prove"),
    "bind": ("fxpipe.run.step.step", "bind"),
}
"""Phase → the function whose time it is, without that of other phases in it."""


class Phases:
    """Where the time goes: that of each phase, and ``rest``."""

    def __init__(self) -> None:
        self.seconds: Figures = {}
        self._open = ["rest"]
        self._since = time.process_time()

    def _note(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def told(self) -> Figures:
        self._note()
        return self.seconds

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        self._note()
        self._open.append(name)
        try:
            yield
        finally:
            self._note()
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.of(name):
                return function(*args, **kwargs)

        return call

    def watch(self) -> None:
        """From now on, in this process: it ends soon."""
        for name, (module, path) in PHASES.items():
            *owners, attribute = path.split(".")
            owner = importlib.import_module(module)
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))


# --- one point, in a process of its own


def measured(run: Callable[..., Figures], *given: Any) -> Figures:
    """Figures of a run, with the MiB that it took at most."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, run, given))
    process.start()
    sender.close()
    figures: Figures = receiver.recv()
    process.join()
    return figures


def _measure(sender: Any, run: Callable[..., Figures], given: tuple[Any, ...]) -> None:
    gc.freeze()  # what was imported is looked through in no point's time
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    with contextlib.redirect_stderr(io.StringIO()):
        figures = run(*given)
    sender.send({**figures, "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before})


class Blocks(nn.Module):
    """Residual blocks of three nodes, a boundary in front of each stage but the first."""

    def __init__(self, blocks: int, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.a_stage = math.ceil(blocks / stages)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place and place % self.a_stage == 0:
                x = fxpipe.stage_boundary(x)
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def compiled(blocks: int, stages: int, ranks: int, microbatches: int, tracer: Any, step: bool = False) -> Figures:
    model, topology = Blocks(blocks, stages), fxpipe.Topology([("pipe", ranks)])
    x = torch.randn(2 * microbatches, 4)
    phases = Phases()
    phases.watch()
    start = time.process_time()
    one = fxpipe.compile(
        model,
        topology,
        microbatches=microbatches,
        tracer=fxpipe.Tracing(tracer, check=False),
        example_args=None if tracer == "symbolic" else (x,),
    )
    total = time.process_time() - start
    if step:
        one(x)
    found = {name: seconds for name, seconds in phases.told().items() if name != "rest"}
    return {**found, "all": total + found.get("bind", 0.0)}


def nodes(count: int, tracer: str) -> Figures:
    return compiled(count // 3, 2, 2, 2, tracer)


def stages(count: int, ranks: int) -> Figures:
    return compiled(1024, count, ranks or count, 8, "symbolic")


def actions(count: int, family: Any, ranks: int) -> Figures:
    """A chain of so many stages, one a rank."""
    edges = tuple(pairwise(range(ranks)))
    start = time.process_time()
    table = build(family, edges, max(count // (3 if family == "zb_h1" else 2) // ranks, 1))
    marks = [start, time.process_time()]
    lower(table.rows, table.links, table.placement, table.backward)
    marks.append(time.process_time())
    str(table)
    marks.append(time.process_time())
    table_and_verify, lowered, printed = (after - before for before, after in pairwise(marks))
    return {"table, verify": table_and_verify, "lower": lowered, "print": printed, "all": marks[-1] - start}


def bound(count: int) -> Figures:
    """Compiled and bound, with one step, whose compute is not counted."""
    return compiled(4, 4, 4, count // 8, "symbolic", step=True)


GROWTH: dict[str, list[tuple[str, Callable[..., Figures], tuple[Any, ...], list[int]]]] = {
    "nodes": [
        (f"nodes, {tracer}", nodes, (tracer,), [1250, 5000, 10000, 20000])
        for tracer in ("symbolic", "export", "record")
    ],
    "stages": [
        ("stages, a rank each", stages, (0,), [16, 64, 128, 256]),
        ("stages on 4 ranks", stages, (4,), [16, 64, 128, 256]),
    ],
    "actions": [
        *(
            (f"actions, {family}, {ranks} ranks", actions, (family, ranks), [most // 16, most // 4, most // 2, most])
            for family, ranks, most in (
                ("1f1b", 8, 500_000),
                ("1f1b", 250, 500_000),
                ("zb_h1", 8, 500_000),
                ("greedy", 8, 250_000),
            )
        ),
        ("actions, bound", bound, (), [31250, 125000, 250000, 500000]),
    ],
}


def exponent(sizes: list[int], figures: list[float]) -> float:
    """The slope of the line through the logarithms of the last three."""
    logarithms = [math.log(size) for size in sizes[-3:]], [math.log(max(figure, 1e-9)) for figure in figures[-3:]]
    return statistics.linear_regression(*logarithms).slope


def growth(what: str, divided: int) -> list[dict[str, Any]]:
    rows = []
    for name, run, given, most in GROWTH[what]:
        sizes = [size // divided for size in most]
        found = [measured(run, size, *given) for size in sizes]
        for figure in found[0].keys() & found[-1].keys():
            values = [one[figure] for one in found]
            if figure in ("all", "MiB") or values[-1] > 0.05 * found[-1]["all"]:
                rows.append({"what": name, "of": figure, "sizes": sizes, "figures": values})
                rows[-1]["exponent"] = exponent(sizes, values)
    return rows


def shown(rows: list[dict[str, Any]]) -> str:
    told = []
    for row in sorted(rows, key=lambda row: (row["what"], row["of"] != "all", row["of"] == "MiB", row["of"])):
        digits = 0 if row["of"] == "MiB" else 2
        figures = ", ".join(f"{figure:.{digits}f}" for figure in row["figures"])
        told.append((row["what"], row["of"], ", ".join(map(str, row["sizes"])), figures, f"{row['exponent']:.2f}"))
    return tabulate(told, headers=["", "", "sizes", "seconds, or MiB", "exponent"], disable_numparse=True)


# --- real models, by phase


def gpt2() -> tuple[Callable[[], nn.Module], dict[str, Any], Any]:
    from transformers import AutoModelForCausalLM, GPT2Config

    tokens = torch.zeros(8, 1024, dtype=torch.int64, device="meta")
    config = GPT2Config(use_cache=False)
    inputs = {"input_ids": tokens, "labels": tokens}
    return lambda: on_meta(lambda: AutoModelForCausalLM.from_config(config)), inputs, {"transformer.h.*": {"every": 6}}


def llama() -> tuple[Callable[[], nn.Module], dict[str, Any], Any]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokens = torch.zeros(8, 2048, dtype=torch.int64, device="meta")
    config = LlamaConfig(use_cache=False)
    inputs = {"input_ids": tokens, "labels": tokens}
    return lambda: on_meta(lambda: AutoModelForCausalLM.from_config(config)), inputs, {"model.layers.*": {"every": 16}}


def clip() -> tuple[Callable[[], nn.Module], dict[str, Any], Any]:
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    image = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    image |= {"patch_size": 14, "image_size": 224}
    config = CLIPConfig(text_config=text, vision_config=image, projection_dim=768)
    tokens = torch.randint(0, 49000, (4, 77))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "return_loss": True}
    inputs["pixel_values"] = torch.randn(4, 3, 224, 224)
    cuts = ["vision_model.encoder.layers.12", "text_model.encoder.layers.6"]
    return lambda: CLIPModel(config), inputs, cuts


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


MODELS = {"GPT-2 124M, meta": gpt2, "Llama, 32 layers, meta": llama, "CLIP ViT-L/14": clip}


def phases_of(name: str) -> Figures:
    make, inputs, cuts = MODELS[name]()
    phases = Phases()
    with phases.of("model"):
        model = make().train()
    on_device = "meta" not in name
    phases.watch()
    rows = len(inputs["input_ids"])
    given = {"boundaries": cuts, "microbatches": rows if not on_device else rows // 2, "example_kwargs": inputs}
    topology = fxpipe.Topology([("pipe", 2)])
    if on_device:
        one = fxpipe.compile(model, topology, **given)
        with phases.of("first step"):
            one(**inputs)
        with phases.of("second step"):
            one(**inputs)
    else:
        fxpipe.preview(model, topology, **given)
    return phases.told()


def imports() -> Figures:
    """Seconds that a fresh Python takes to import each, what stands before it being there."""
    names = ("torch", "fxpipe", "fxpipe.compiler", "transformers")
    code = "import time, importlib\nfor name in %r:\n    t = time.process_time(); importlib.import_module(name)\n"
    code += "    print(time.process_time() - t)"
    told = subprocess.run([sys.executable, "-c", code % (names,)], check=True, capture_output=True, text=True).stdout
    return {f"import {name}": float(line) for name, line in zip(names, told.split(), strict=True)}


def models(names: list[str]) -> dict[str, Figures]:
    first = imports()
    return {name: {**first, **measured(phases_of, name)} for name in names}


def shown_by_phase(found: dict[str, Figures]) -> str:
    phases = dict.fromkeys(phase for figures in found.values() for phase in figures if phase != "MiB")
    rows = [[phase, *(f"{one[phase]:.2f}" if phase in one else "" for one in found.values())] for phase in phases]
    total = [sum(s for phase, s in one.items() if phase not in ("MiB", "second step")) for one in found.values()]
    rows.append(["to the first step", *(f"{seconds:.1f}" for seconds in total)])
    rows.append(["MiB", *(f"{one['MiB']:.0f}" for one in found.values())])
    return tabulate(rows, headers=["seconds", *found], disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"{', '.join(GROWTH)}; with --models: {', '.join(MODELS)}")
    parser.add_argument("--models", action="store_true", help="time to the first step, by phase")
    parser.add_argument("--divided", type=int, default=1, help="by how much sizes are smaller")
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    known = list(MODELS if arguments.models else GROWTH)
    asked = [name for name in known if not arguments.what or any(name.startswith(one) for one in arguments.what)]
    if not asked:
        parser.error(f"{arguments.what} is none of {known}")
    torch.set_num_threads(1)
    figures: Any
    if arguments.models:
        figures = models(asked)
        print(shown_by_phase(figures))
    else:
        one_rank = fxpipe.Topology([("pipe", 1)])
        fxpipe.preview(Blocks(2, 1), one_rank, tracer="export", example_args=(torch.ones(4, 4),))  # imports the rest
        figures = [row for what in asked for row in growth(what, arguments.divided)]
        print(shown(figures))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
