"""Capture: the stages of each kind of batch, made by a tracer from a description of its inputs.

The modules, in the order in which a batch meets them:

1. ``captures``: the captures that a model has, as an immutable value;
2. ``guard``: whether a capture is valid for a micro-batch;
3. ``capturing``: the tracer's request, the capture, and the facts that it found;
4. ``region_facts``: what opaque regions do in a real run;
5. ``auto_opaque``: the parts of a model that become opaque, because no tracer can capture them;
6. ``questions``: what forward asks about the values of its inputs;
7. ``examining``: the program, cut into stages;
8. ``same_stages``: the stages of several captures, adapted so that one table can run them;
9. ``capture_list``: what ``forward_backward.captures`` prints.
"""
