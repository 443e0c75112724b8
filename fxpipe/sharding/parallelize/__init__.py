"""``parallelize=``: stages that the user has wrapped or sharded, and their gradients."""
