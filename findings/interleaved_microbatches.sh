#!/usr/bin/env bash
# torch 2.13.0: ScheduleInterleaved1F1B on p ranks takes m micro-batches if m is a multiple of max(1, m // p), not of p.
# So 7 on 4 ranks work, and 9, 14 and 18 do not, though 15 and 10 do. ScheduleLoopedBFS takes every m.
# A good guess: multiples of p, as in Megatron-LM and the paper; or every m, since the docstring says it is relaxed.
# Seen, p = 4, up to 24: 1 to 8, 10, 12, 15, 16, 20, 24.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleLoopedBFS
from torch.testing._internal.distributed.fake_pg import FakeStore


def taken(schedule):
    """The numbers of micro-batches, up to 24, for which the schedule is made."""
    numbers = []
    for microbatches in range(1, 25):
        try:
            schedule(stages, microbatches, loss_fn=nn.functional.mse_loss)
        except ValueError as error:
            assert "multiple of the number of rounds" in str(error), error
        else:
            numbers.append(microbatches)
    return numbers


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # schedules are made without messages
stages = [PipelineStage(nn.Linear(2, 2), index, 8, torch.device("cpu")) for index in (0, 4)]
interleaved, looped = taken(ScheduleInterleaved1F1B), taken(ScheduleLoopedBFS)
dist.destroy_process_group()
print(interleaved)
assert interleaved == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24], interleaved
assert looped == list(range(1, 25)), looped
PY
OMP_NUM_THREADS=1 timeout 120 "$folder/venv/bin/python" "$folder/main.py"
