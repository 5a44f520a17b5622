"""The old place of `llama.SamplingParams`."""

from llama.sampling_params import SamplingParams

__all__ = ["SamplingParams"]
