#!/usr/bin/env bash
# torch 2.13.0, gloo: broadcast, which only moves bytes, refuses int16 and float8 with "Invalid scalar type", and takes
# bool and complex64, which gloo has no types for. send and recv move all of them.
# A good guess: what send takes broadcast takes, or a backend that lacks a type lacks bool and complex first.
# Seen: send takes all five; broadcast takes uint8, bool, complex64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import datetime
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TYPES = [torch.uint8, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn]


def taken(call, rank):
    """The types that arrive on rank 1 as rank 0 has them."""
    names = []
    for dtype in TYPES:
        sent = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
        tensor = sent.clone() if rank == 0 else torch.zeros(3).to(dtype)
        try:
            call(tensor)
        except RuntimeError as error:
            assert "Invalid scalar type" in str(error), error
            continue
        assert torch.equal(tensor.view(torch.uint8), sent.view(torch.uint8))
        names.append(str(dtype).removeprefix("torch."))
    return names


def work(rank, file):
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=limit)
    sent = taken(lambda tensor: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0), rank)
    broadcast = taken(lambda tensor: dist.broadcast(tensor, 0), rank)
    print(rank, sent, broadcast)
    assert sent == ["uint8", "bool", "complex64", "int16", "float8_e4m3fn"], sent
    assert broadcast == ["uint8", "bool", "complex64"], broadcast
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=2)
PY
OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py" "$folder/meeting"
