"""What the negatives of a whole batch are worth: zero-shot accuracy after as many steps, with either loss.

    python examples/benchmarks/whole_batch.py    # nine runs, some minutes

Trains `examples/train_clip.py` with `--loss whole` and with `--loss microbatch`, on the same rows in the same order.
"""

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

SCRIPT = Path(__file__).parents[1] / "train_clip.py"


def accuracy(loss: str, steps: int, batch_size: int, microbatches: int, seed: int) -> float:
    """Of held-out images, in percent."""
    given = {"loss": loss, "steps": steps, "batch-size": batch_size, "microbatches": microbatches, "seed": seed}
    options = [f"--{name}={value}" for name, value in given.items()]
    done = subprocess.run([sys.executable, SCRIPT, *options], check=True, stdout=subprocess.PIPE, text=True)
    found = re.search(r"zero-shot accuracy on held-out images: ([0-9.]+)%", done.stdout)
    if found is None:
        raise SystemExit(f"no accuracy in what {SCRIPT.name} prints:\n{done.stdout}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Zero-shot accuracy with the loss of the whole batch and without.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    rows = []
    kinds = [("microbatch", number) for number in reversed(args.microbatches)] + [("whole", args.microbatches[0])]
    for loss, number in kinds:
        found = [accuracy(loss, args.steps, args.batch_size, number, seed) for seed in args.seeds]
        contrasted = args.batch_size if loss == "whole" else args.batch_size // number
        rows.append([loss, number, contrasted, *(f"{one:.1f}" for one in found), f"{statistics.mean(found):.1f}"])
    headers = ["--loss", "micro-batches", "rows contrasted", *(f"seed {seed}, %" for seed in args.seeds), "mean, %"]
    print(f"zero-shot accuracy after {args.steps} steps of {args.batch_size} rows")
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1))))


if __name__ == "__main__":
    main()
