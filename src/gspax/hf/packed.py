"""Tensors in fewer than 16 bits: 4 bits as in gpt-oss, and 8 bits as in DeepSeek-V3, each with scales beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gspax.hf.tensors import DTYPES, FP8, Part, Stored, read, read_part

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # E2M1, by its 4 bits
FP4_BLOCK = 32  # numbers with one scale
E4M3 = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)  # by its 8 bits
FP8_BLOCK = 128  # rows and columns of a matrix with one scale
SCALES = "_scale_inv"


@dataclass(frozen=True)
class Mxfp4:
    """Numbers of 4 bits.

    The format (OCP Microscaling Formats 1.0): 32 numbers E2M1, two in a byte, the first in its low bits, have a scale,
    a power of two, whose exponent plus 127 is a byte.
    """

    blocks: Stored  # bytes [..., blocks, 16]
    scales: Stored  # bytes [..., blocks]

    @property
    def title(self) -> str:
        """What its numbers are called in a sentence."""
        return "the experts' numbers of 4 bits (mxfp4)"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded tensor."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * FP4_BLOCK)

    @property
    def fits(self) -> bool:
        """Whether the parts belong together."""
        return self.blocks.shape == (*self.scales.shape, FP4_BLOCK // 2)

    def numbers(self, first: int, last: int) -> np.ndarray:
        """Read numbers `first` to `last`, as `tensors.Packed` does."""
        low, high = first // FP4_BLOCK, -(-last // FP4_BLOCK)
        part = Part(1, low, high - low, math.prod(self.scales.shape))
        numbers = unpack(read_part(self.blocks, part), read_part(self.scales, part)).reshape(-1)
        return numbers[first - low * FP4_BLOCK : last - low * FP4_BLOCK]


@dataclass(frozen=True)
class BlockFp8:
    """Matrices of 8 bits, E4M3; each block of 128 x 128 numbers has a factor (DeepSeek-V3, arXiv 2412.19437)."""

    weights: Stored  # float8 [..., rows, columns]
    scales: Stored  # float32 [..., blocks of rows, blocks of columns]

    @property
    def title(self) -> str:
        """What its numbers are called in a sentence."""
        return "the numbers of 8 bits (fp8)"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded tensor."""
        return self.weights.shape

    @property
    def fits(self) -> bool:
        """Whether the parts belong together."""
        if self.weights.dtype != FP8 or len(self.weights.shape) < 2:
            return False
        *lead, rows, columns = self.weights.shape
        return self.scales.shape == (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))

    def numbers(self, first: int, last: int) -> np.ndarray:
        """Read numbers `first` to `last`, as `tensors.Packed` does; whole rows are decoded."""
        *lead, rows, columns = self.weights.shape
        low, high = first // columns, -(-last // columns)
        bits = read_part(self.weights, Part(1, low, high - low, math.prod(lead) * rows)).view(np.uint8)
        scales = (
            read(self.scales).astype(np.float32, copy=False).reshape(-1, self.scales.shape[-2], self.scales.shape[-1])
        )
        row = np.arange(low, high)
        factors = scales[row // rows, row % rows // FP8_BLOCK].repeat(FP8_BLOCK, axis=1)[:, :columns]
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are rejected later
            numbers = (E4M3[bits.reshape(-1, columns)] * factors).astype(DTYPES["BF16"]).reshape(-1)
        return numbers[first - low * columns : last - low * columns]


def join(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Join numbers and scales to one tensor of bfloat16 numbers, which has the name of the numbers.

    Parts that do not belong together stay as they are.
    """
    joined = dict(tensors)
    for name, stored in tensors.items():
        parts = _find_parts(name, tensors)
        if parts is not None and parts.fits:
            joined[name] = Stored(name, stored.file, DTYPES["BF16"], parts.shape, 0, parts)
            del joined[parts.scales.name]
    return joined


def _find_parts(name: str, tensors: Mapping[str, Stored]) -> Mxfp4 | BlockFp8 | None:
    """Return a tensor with the scales beside it; None if there are none."""
    if name.endswith("_blocks") and (scales := tensors.get(name.removesuffix("_blocks") + "_scales")) is not None:
        return Mxfp4(tensors[name], scales)
    if (scales := tensors.get(name + SCALES)) is not None:
        return BlockFp8(tensors[name], scales)
    return None


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode blocks and scales of mxfp4 to bfloat16, [blocks, 32]."""
    blocks = blocks.reshape(-1, FP4_BLOCK // 2)
    numbers = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(-1, FP4_BLOCK)
    with np.errstate(over="ignore"):  # infinities are rejected later
        return np.ldexp(numbers, scales.reshape(-1, 1).astype(np.int32) - 127).astype(DTYPES["BF16"])
