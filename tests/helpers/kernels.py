"""Whether the CPU kernels can be compiled and run here."""

from llama.ops.cpu import build, native

SUPPORTED = [x for x in build.INSTRUCTION_SETS if native.cpu_flags() >= x.needs]
HAS_KERNELS = bool(SUPPORTED) and build.find_compiler() is not None
