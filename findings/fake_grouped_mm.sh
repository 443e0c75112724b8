#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.nn.functional.grouped_mm multiplies float32 on the CPU, and its shape-only run refuses float32. So
# a mixture of experts that trains cannot be traced: FakeTensorMode, torch.export and the meta device ask for bfloat16.
# A good guess: a fake run accepts what a real run accepts, as the fake run only leaves out the numbers.
# Seen: float32: real (6, 16); fake and meta RuntimeError "Expected inputs of BF16 type ...". bfloat16: (6, 16) in all three.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import contextlib

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode


def product(dtype, device):
    """Six rows, three for each of two experts: (6, 8) times (2, 8, 16)."""
    rows = torch.randn(6, 8, dtype=dtype, device=device)
    experts = torch.randn(2, 8, 16, dtype=dtype, device=device)
    return tuple(F.grouped_mm(rows, experts, offs=torch.tensor([3, 6], dtype=torch.int32, device=device)).shape)


def outcome(dtype, device="cpu", mode=contextlib.nullcontext):
    try:
        with mode():
            return product(dtype, device)
    except RuntimeError as error:
        return str(error).partition(",")[0].partition(".")[0][:40]


found = {
    str(dtype).removeprefix("torch."): [
        outcome(dtype), outcome(dtype, mode=FakeTensorMode), outcome(dtype, "meta")
    ]
    for dtype in (torch.float32, torch.bfloat16)
}
print(torch.__version__, found)
real, fake, meta = found["float32"]
assert real == (6, 16), real
assert isinstance(fake, str) and "BF16" in fake, fake
assert isinstance(meta, str) and "BF16" in meta, meta
assert found["bfloat16"] == [(6, 16)] * 3, found
PY
OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py"
