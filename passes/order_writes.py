"""Order writes: makes later uses of a written value use the result of the write.

A write such as ``mask[i] = 1`` returns nothing, and no node of the graph depends on it: a pass that follows edges would
put it into the wrong stage. After this pass, edges express the order of writes and reads.

Takes: a ``Program``. Gives: a ``Program`` with its own graph. For example::

    %setitem = setitem(%mask, 0, 1)        →   %setitem_written = fxpipe.setitem(%mask, 0, 1)
    %y = add(%x, %mask)                    →   %y = add(%x, %setitem_written)

fxpipe's ``setitem`` returns the tensor that it has written; ``x.add_(1)`` returns it anyway. Reads before the write
keep the old name.
"""

from __future__ import annotations

from torch import fx

from fxpipe.errors import PartitionError
from fxpipe.graph.operators import setitem
from fxpipe.graph.program import Program, where
from fxpipe.passes.effects import is_item_write, returns_written, written


def order_writes(program: Program) -> Program:
    """Returns the program with an edge from every write to the later reads."""
    program = program.with_own_graph()
    for node in list(program.nodes):
        targets = written(program, node)
        for target in targets:
            if target.op == "get_attr" and str(target.target) in program.constants:
                raise PartitionError(
                    f"{node.name}{where(node)} writes a tensor that is no buffer of the model, and every micro-batch "
                    "would write the same one; make it from a traced tensor, as in x.new_zeros(...), or register it as "
                    "a buffer"
                )
        if not targets:
            continue
        # Only later nodes read the written value; earlier readers keep the old value.
        result = _as_expression(program, node)
        if result is not None:
            targets[0].replace_all_uses_with(result, lambda user: user is not result and result < user)  # noqa: B023
    return program


def _as_expression(program: Program, node: fx.Node) -> fx.Node | None:
    """Returns a node whose value is the tensor that ``node`` has written; None if ``node`` returns something else."""
    if is_item_write(node):
        with program.graph.inserting_after(node):
            expression = program.graph.create_node("call_function", setitem, node.args, {}, name=f"{node.name}_written")
        expression.meta = dict(node.meta)
        expression.stack_trace = node.stack_trace
        program.graph.erase_node(node)
        return expression
    return node if returns_written(program, node) else None
