"""Balance: what nodes cost, which stages to cut a program into, and which rank each runs on."""

from fxpipe.plan.balance.choose import Balanced, balance, place_stages
from fxpipe.plan.balance.hardware import Hardware
from fxpipe.plan.balance.node_costs import CostUnknown, NodeCost, NodeCosts, costs_from_shapes

__all__ = [
    "Balanced",
    "CostUnknown",
    "Hardware",
    "NodeCost",
    "NodeCosts",
    "balance",
    "costs_from_shapes",
    "place_stages",
]
