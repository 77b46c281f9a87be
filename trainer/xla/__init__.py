"""The only home of torch_xla in the trainer: devices and their flags, the mesh, tensors and batches laid out on it.

Another backend would stand beside this room, and nothing else would move.
"""

import logging

# torch_xla logs which device it takes as it is imported; `init_runtime` returns a sentence that says it better
_disabled = logging.root.manager.disable
logging.disable(logging.WARNING)
import torch_xla  # noqa: E402, F401

logging.disable(_disabled)
