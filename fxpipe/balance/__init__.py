"""Balance: what nodes cost, which stages to cut a program into, and which rank each runs on."""

from fxpipe.balance.balanced import Balanced, balance, place_stages
from fxpipe.balance.hardware import Hardware
from fxpipe.balance.measured import costs_measured
from fxpipe.balance.node_costs import CostUnknown, NodeCost, NodeCosts, costs_from_shapes

__all__ = [
    "Balanced",
    "CostUnknown",
    "Hardware",
    "NodeCost",
    "NodeCosts",
    "balance",
    "costs_from_shapes",
    "costs_measured",
    "place_stages",
]
