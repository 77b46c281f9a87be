"""XLA: the devices, and every tensor's place on them.

Other packages say where a tensor should lie; this one makes torch_xla put it there, and checks that it did.
A second backend would stand beside it.
"""
