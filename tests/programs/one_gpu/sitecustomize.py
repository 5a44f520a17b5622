"""A module for PYTHONPATH that makes Python processes believe that their machine has one GPU.

The GPU cannot compute; whoever selects it by default fails as soon as memory is allocated.
"""

import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
