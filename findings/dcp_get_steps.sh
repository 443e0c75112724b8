#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict of an optimizer that has not stepped
# changes the training that follows. It makes the state by a step with lr=0 and zero gradients, and leaves it: Adam counts
# that step in its bias correction, and SGD's dampening applies from the first gradient on. RMSprop is not changed.
# A good guess: what is called "get" reads.
# Seen: Adam's first step is 0.0744 in place of 0.1, SGD's (momentum 0.9, dampening 0.5) 0.05 in place of 0.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_step(reads, make):
    """How far the first step moves a weight whose gradient is 1."""
    model = nn.Linear(1, 1, bias=False)
    before, optimizer = model.weight.item(), make(model.parameters())
    if reads:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return round(before - model.weight.item(), 4)


makes = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.75),
}
found = {name: (first_step(False, make), first_step(True, make)) for name, make in makes.items()}
print(found)
# Adam after t steps of which the last alone had a gradient g: lr g (1 - b1) / (1 - b1^t) / sqrt(g^2 (1 - b2) / (1 - b2^t))
adam = 0.1 * (0.1 / (1 - 0.9**2)) / (0.001 / (1 - 0.999**2)) ** 0.5
assert found == {"Adam": (0.1, round(adam, 4)), "SGD": (0.1, 0.05), "RMSprop": (0.2, 0.2)}, found
PY
OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py"
