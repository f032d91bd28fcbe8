"""Operations of language models as pure functions on arrays. Imports nothing of `jaxlab`."""

from pallas_kernels.attention import (
    attention,
    attention_reference,
    compiling_for,
    sharded_attention,
)
from pallas_kernels.block_sparse import block_sparse_attention
from pallas_kernels.cca import cca_attention, cca_mask, core_tokens
from pallas_kernels.kv_shift import kv_shift
from pallas_kernels.mlstm import (
    MLSTMState,
    MLSTMSummary,
    mlstm,
    mlstm_compose,
    mlstm_step,
    mlstm_summary,
)
from pallas_kernels.sepllm import kv_retention, sepllm_attention, sepllm_mask
from pallas_kernels.slstm import SLSTMState, slstm
from pallas_kernels.xattention import (
    antidiagonal_block_scores,
    calibrate_coverage,
    calibrate_dp,
    select_blocks,
    xattention,
)

__all__ = [
    "MLSTMState",
    "MLSTMSummary",
    "SLSTMState",
    "antidiagonal_block_scores",
    "attention",
    "attention_reference",
    "block_sparse_attention",
    "calibrate_coverage",
    "calibrate_dp",
    "cca_attention",
    "cca_mask",
    "compiling_for",
    "core_tokens",
    "kv_retention",
    "kv_shift",
    "mlstm",
    "mlstm_compose",
    "mlstm_step",
    "mlstm_summary",
    "select_blocks",
    "sepllm_attention",
    "sepllm_mask",
    "sharded_attention",
    "slstm",
    "xattention",
]
