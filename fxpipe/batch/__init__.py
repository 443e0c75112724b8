"""Batch: the inputs of a call, from the user's arguments to micro-batches, and the outputs back to one value.

1. ``description``: inputs by name, without their numbers, in a form that ranks compare. ``objects``: inputs that are
   neither tensors nor plain values.
2. ``rules``: how one input is counted, split and joined. ``rows``: the rows of all inputs together, and the counts of
   packed inputs.
3. ``batch``: the batch, and its micro-batches.
4. ``pattern``: the facts on which captures and plans depend. ``label_count``: the number of labels in the whole batch.
5. ``group_inputs``: the inputs of stages that run once for several micro-batches. ``outputs``: the outputs of
   micro-batches, joined.
"""
