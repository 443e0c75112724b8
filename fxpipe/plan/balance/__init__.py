"""Balance: what nodes cost, which stages to cut a program into, and which rank each runs on."""

from fxpipe.plan.balance.block_graph import BlockGraph, work_of_stages
from fxpipe.plan.balance.choose import Balanced, balance, place_stages
from fxpipe.plan.balance.node_costs import CostUnknown, NodeCost, NodeCosts, costs_from_shapes
from fxpipe.plan.balance.stage_work import StageWork

__all__ = [
    "Balanced",
    "BlockGraph",
    "CostUnknown",
    "NodeCost",
    "NodeCosts",
    "StageWork",
    "balance",
    "costs_from_shapes",
    "place_stages",
    "work_of_stages",
]
