"""Distributed: ranks, groups, processes and the transports between them, over torch.distributed."""
