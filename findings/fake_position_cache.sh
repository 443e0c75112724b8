#!/usr/bin/env bash
# transformers 5.23.0 with torch 2.13.0 (CPU): RT-DETR keeps its position embeddings in a functools.lru_cache of the class. The
# cache steps aside for TorchDynamo, and not for a FakeTensorMode, by which tools find out shapes and memory without running.
# A good guess: a run under a FakeTensorMode leaves a model as it was, since it computes nothing.
# Seen: after a fake run, a real run of the same size, of another object, gets the fake embeddings: FakeTensor, no numbers.
# Control: another size, which the fake run did not have, and the same size in a process without a fake run, are plain tensors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import sys

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.rt_detr.modeling_rt_detr import RTDetrSinePositionEmbedding


def kind(width):
    """The type of the embeddings of a grid of so many columns and two rows, of a new object."""
    embedding = RTDetrSinePositionEmbedding(embed_dim=16)
    return type(embedding(width=width, height=2, device=torch.device("cpu"), dtype=torch.float32)).__name__


if "fake" in sys.argv:
    with FakeTensorMode():
        print(torch.__version__, transformers.__version__, "in the fake run:", kind(3))
found = {"same size": kind(3), "another size": kind(4)}
print(sys.argv[1], found)
assert found["another size"] == "Tensor", found
assert found["same size"] == ("FakeTensor" if "fake" in sys.argv else "Tensor"), found
PY
for before in fake none; do
    OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py" "$before"
done
