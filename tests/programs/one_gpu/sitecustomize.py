"""In a folder of PYTHONPATH: Python processes believe that their machine has one GPU.

It cannot compute; whoever picks it by default fails as soon as memory is asked for.
"""

import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
