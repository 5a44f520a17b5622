"""Whether the CPU kernels can be compiled and run here."""

import shutil

from llama.ops.cpu import native

HAS_KERNELS = native.cpu_flags() >= {"avx2", "fma"} and shutil.which("g++") is not None
