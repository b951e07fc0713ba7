"""Accelerators and slices by the names that users know, with the figures that vendors publish."""

import dataclasses
import math
import re

from zest_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip's published figures.

    Attributes:
      name: as vendors write it.
      memory: bytes.
      flops: bfloat16 operations a second, dense.
      bandwidth: bytes a second of its memory.
      links: bytes a second that it sends to its neighbours over all links, one way.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    links: float


# Cloud TPU: cloud.google.com/tpu/docs/v5e, /v5p and /v6e (memory, bf16 peak, HBM bandwidth, and
# "interchip interconnect bandwidth", which counts both directions: halved here). Runtimes show a
# few percent more memory than these decimal figures; that is left as a margin. H200 SXM: NVIDIA's
# data sheet, without sparsity; NVLink's 900 GB/s count both directions.
CHIPS = {
    "v5e": Chip("TPU v5e", 16e9, 197e12, 819e9, 400e9 / 2),
    "v5p": Chip("TPU v5p", 95e9, 459e12, 2_765e9, 1_200e9 / 2),
    "v6e": Chip("TPU v6e", 32e9, 918e12, 1_640e9, 800e9 / 2),
    "h200": Chip("NVIDIA H200", 141e9, 989e12, 4_800e9, 900e9 / 2),
}
# Chips along each axis; v5e and v6e slices are flat, of up to 16 x 16.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_LARGEST_CUBE = 8_192


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that run together.

    Attributes:
      name: as given.
      chip: of what kind.
      count: chips; each is one device.
      topology: the TPU compiler's name; "" for GPUs.
    """

    name: str
    chip: Chip
    count: int
    topology: str

    @property
    def platform(self) -> str:
        """As JAX calls it."""
        return "tpu" if self.topology else "cuda"


def find_slice(name: str) -> Slice:
    """A slice by its name: v5e-256, v6e-64 and h200-8 count chips, v5p-128 counts cores, two a
    chip, as Google does. The compiler's own names ("v5p:2x2x1") are understood too.

    Raises:
      UserError: there is none of that name; tells what there is.
    """
    match = re.fullmatch(r"(v5e|v5litepod|v5p|v6e|h200)([-:])([\dx]+)", name.strip().lower())
    if not match:
        raise UserError(
            f"topology {name!r} is not known; expected v5e-N, v6e-N or h200-N of N chips, or "
            "v5p-N of N cores (two a chip)."
        )
    kind, mark, size = match.groups()
    kind = "v5e" if kind == "v5litepod" else kind
    chip = CHIPS[kind]
    if mark == ":":
        if kind == "h200":
            raise UserError(f"topology {name!r}: GPUs are counted, as in h200-8.")
        return Slice(name, chip, math.prod(int(n) for n in size.split("x")), f"{kind}:{size}")
    count = int(size) if size.isdigit() else 0
    if kind == "h200":
        if not 1 <= count <= 64:
            raise UserError(f"topology {name!r}: expected h200-1 to h200-64.")
        return Slice(name, chip, count, "")
    if kind == "v5p":
        if count % 8 or count < 8 or count & (count - 1) or count > _LARGEST_CUBE:
            raise UserError(
                f"topology {name!r}: v5p slices have 8, 16, 32, … cores, a power of two up to "
                f"{_LARGEST_CUBE}."
            )
        return Slice(name, chip, count // 2, f"v5p:{_cube(count // 2)}")
    if count not in _FLAT:
        sizes = ", ".join(map(str, _FLAT))
        raise UserError(f"topology {name!r}: {kind} slices have {sizes} chips.")
    return Slice(name, chip, count, f"{kind}:{_FLAT[count]}")


def _cube(chips: int) -> str:
    """The usual shape of a v5p slice: as near to a cube as powers of two come, smallest first; one
    host has 2 x 2 x 1."""
    if chips == 4:
        return "2x2x1"
    power = chips.bit_length() - 1
    low, rest = divmod(power, 3)
    axes = sorted(2 ** (low + (i < rest)) for i in range(3))
    return "x".join(map(str, axes))
