#!/usr/bin/env bash
# torch 2.13.0, FSDP2: of the hooks on a parameter only register_post_accumulate_grad_hook runs, and only if it is
# registered after fully_shard. A register_hook never runs, registered before or after, though backward fills .grad:
# autograd's gradient is the unsharded parameter's, and the sharded parameter gets its own by assignment.
# A good guess: hooks run, as without fully_shard; or those that were registered before it are carried over.
# Seen: plain [hook, post], before fully_shard [], after it [post]; .grad is there in each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def hook(model, calls):
    model.weight.register_hook(lambda gradient: calls.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("post"))


def called(shards, first):
    """The hooks that a backward calls. ``first``: whether they are registered before fully_shard."""
    model, calls = nn.Linear(4, 4), []
    if first:
        hook(model, calls)
    if shards:
        fully_shard(model)
    if not first:
        hook(model, calls)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    return calls


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = [called(*case) for case in [(False, True), (True, True), (True, False)]]
dist.destroy_process_group()
print(found)
assert found == [["hook", "post"], [], ["post"]], found
PY
OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py"
