"""XAttention: prefill that attends to the blocks which antidiagonal sums of the map point at."""

from pallas_kernels.xattention.calibration import (
    ThresholdTable,
    calibrate_coverage,
    calibrate_dp,
)
from pallas_kernels.xattention.prefill import xattention
from pallas_kernels.xattention.scores import antidiagonal_block_scores
from pallas_kernels.xattention.selection import select_blocks

__all__ = [
    "ThresholdTable",
    "antidiagonal_block_scores",
    "calibrate_coverage",
    "calibrate_dp",
    "select_blocks",
    "xattention",
]
