"""Write NCCL's library with the machine code of one GPU architecture, small enough to carry.

    pip download --no-deps --only-binary :all: --platform manylinux_2_18_x86_64 -d DIR \\
        nvidia-nccl-cu13==2.30.7
    unzip -q DIR/*.whl -d DIR/x
    python scripts/bench/slim_nccl.py DIR/x/nvidia/nccl/lib/libnccl.so.2 libnccl.so.2 --arch 90
    xz -3 -T0 libnccl.so.2

In: the library, whose 166 "fat binaries" hold machine code of six architectures and PTX. Out: the
same library with zeros in place of all code but that of one architecture. Every offset and header
stays, by which the driver finds the code of its GPU. Of 252 MB, xz makes 39.
"""

import argparse
import struct
from collections import Counter
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # of a fat binary: magic, version, bytes of the header, bytes
# Of an entry: kind, version, bytes of the header, bytes, compressed, options, minor, major, arch.
_ENTRY = struct.Struct("<HHIQIIHHI")
_HEADER_BYTES = 16
_MIN_ENTRY_BYTES = 40
_PTX = 1
_CODE = 2


def slim(data: bytearray, arch: int) -> Counter[tuple[int, int]]:
    """Overwrite the entries of other architectures with zeros.

    Args:
        data: The library, which is changed in place.
        arch: The architecture whose machine code stays, such as 90.

    Returns:
        The bytes of all entries by their kind and architecture.

    Raises:
        ValueError: An entry has another form.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    at = data.find(_MAGIC)
    while at >= 0:
        _, _, header, size = _HEADER.unpack_from(data, at)
        entry = at + header
        end = entry + size
        if header != _HEADER_BYTES or end > len(data):  # the magic number by chance
            at = data.find(_MAGIC, at + len(_MAGIC))
            continue
        while entry < end:
            kind, _, entry_header, length, *_, entry_arch = _ENTRY.unpack_from(data, entry)
            if kind not in (_PTX, _CODE) or entry_header < _MIN_ENTRY_BYTES:
                raise ValueError(f"byte {entry}: an entry of kind {kind}, header {entry_header}")
            sizes[kind, entry_arch] += length
            first = entry + entry_header
            if (kind, entry_arch) != (_CODE, arch):
                data[first : first + length] = bytes(length)
            entry = first + length
        at = data.find(_MAGIC, end)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="90: H100 and H200")
    given = parser.parse_args()
    data = bytearray(given.source.read_bytes())
    sizes = slim(data, given.arch)
    if not sizes[_CODE, given.arch]:
        parser.error(f"no machine code for sm_{given.arch} in {given.source}")
    given.target.write_bytes(data)
    for (kind, arch), length in sorted(sizes.items()):
        print(f"{'PTX' if kind == _PTX else 'code'} sm_{arch}: {length / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
