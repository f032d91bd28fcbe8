"""Few shapes for many lengths: what a compiled function is made for is rounded up to a bucket."""

from __future__ import annotations

SMALLEST_BLOCK = 16
SMALLEST_CACHE = 128


def batch_bucket(rows: int) -> int:
    """Rows to compile for: the next power of two."""
    return 1 << (rows - 1).bit_length()


def cache_bucket(length: int) -> int:
    """Cache slots to compile for: 128, 192, 256, 384, 512, 768, …

    Attention reads every slot, used or not, so the steps are half as wide as powers of two.
    """
    power = max(SMALLEST_CACHE, 1 << (length - 1).bit_length())
    between = power * 3 // 4
    return between if power > SMALLEST_CACHE and length <= between else power


def prefill_blocks(length: int, block_size: int) -> list[int]:
    """Widths of the blocks that a prompt of `length` is read in; their sum is at least `length`.

    Whole blocks of `block_size`, then one rounded up to a power of two, so that a prompt of any
    length uses only a handful of widths.
    """
    whole, rest = divmod(length, block_size)
    blocks = [block_size] * whole
    if rest:
        power = max(SMALLEST_BLOCK, 1 << (rest - 1).bit_length())
        blocks.append(min(power, block_size))
    return blocks
