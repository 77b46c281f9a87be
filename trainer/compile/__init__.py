"""A run's graphs compiled by the TPU's own compiler, on a machine that has no TPU.

They are lowered with placeholders for weights and given to libtpu in a process of its own. The report says whether the
run fits, and of its train step what fills the HBM, what crosses which mesh axis, and what bounds it.
"""
