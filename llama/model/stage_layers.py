"""How many layers each stage of a pipeline holds, so that all take as long for a step.

In: the sizes of a model, how its weights are stored, and the sequences of a step. Out: the number
of layers of each stage. What counts are the steps that generate: each token of an answer passes all
layers and the lm_head. The times of a layer and of the lm_head are those of their matrices, by the
rates of a device that is typical of its kind. Only their ratio matters, so that nothing is measured
and every rank comes to the same numbers.

The other parts are left out. Attention depends on contexts that are not known yet, and sampling and
the embedding took about 1 % of a step of 8 sequences of the 1B shape on a CPU. There the lm_head
took as long as 4.1 to 4.5 layers, and has the elements of 4.3.
"""

import math
from fractions import Fraction

from llama.model.args import ModelArgs
from llama.model.cost import DEVICES, Storage, block_matrix_size, weight_shapes
from llama.ranks.placement import divide_layers


def stage_layers(
    args: ModelArgs, storage: Storage, stages: int, rows: int, *, is_gpu: bool
) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Args:
        args: The model's sizes.
        storage: How it is stored and multiplied.
        stages: The number of stages.
        rows: The sequences of a step, one row for each.
        is_gpu: Whether the stages run on GPUs, which read the weights of such a step for longer
            than they multiply; a CPU multiplies for longer.
    """
    device = DEVICES["h100" if is_gpu else "cpu"]
    flops = device.flops[storage.bits]

    def seconds(num_elements: int, width: float) -> float:
        """Return the time to read a matrix, or to multiply it if that takes longer."""
        reading = num_elements * width / device.bandwidth
        return max(reading, 2 * num_elements * rows / flops)

    layer = seconds(block_matrix_size(args), storage.layer_width)
    lm_head = seconds(math.prod(weight_shapes(args)["output"]), storage.head_width)
    return divide_layers(args.n_layers, stages, Fraction(round(1000 * lm_head / layer), 1000))
