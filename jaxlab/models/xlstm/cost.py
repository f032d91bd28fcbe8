"""What an xLSTM's arithmetic and memory come to; see `jaxlab.models.cost.Cost`.

Nothing here depends on how long a row already is.
"""

from __future__ import annotations

import jax

from jaxlab.models.xlstm.cache import FOLDED_TOGETHER, init_xlstm_cache
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.slstm import CONV_TAPS
from pallas_kernels.mlstm.xla import CHUNK_SIZE, default_chunk_size

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def matmul_params(config: XLSTMConfig) -> int:
    """All kernels and the unembedding. Of an sLSTM's heads each has its own square block."""
    width = config.embedding_dim
    mlstm = width * (2 * config.qk_dim + 3 * config.v_dim + 2 * config.num_heads)
    mlstm += 3 * width * config.intermediate_size
    slstm = 8 * width * width // config.num_heads  # four gates: of the input, and recurrent
    slstm += 3 * width * config.slstm_intermediate_size + CONV_TAPS * width
    blocks = config.blocks.count("m") * mlstm + config.blocks.count("s") * slstm
    return blocks + width * config.vocab_size


def mixing_flops(config: XLSTMConfig, queries: int, keys: int) -> float:
    """The mLSTM cells over the new tokens. An sLSTM's are products with its parameters."""
    return config.blocks.count("m") * cell_flops(config, queries)


def cell_flops(config: XLSTMConfig, tokens: int) -> float:
    """Operations of the heads of one mLSTM cell over a row of `tokens`, forward and chunkwise.

    A chunk of L tokens reads and updates the memory, `4·L·d_qk·d_v + 2·d_qk·d_v`, and mixes its
    tokens, `2·L²·(1 + d_qk) + 2·L²·d_v` (xLSTM 7B, arXiv:2503.13427). One token is a chunk of one.
    """
    keys, values = config.qk_head_dim, config.v_head_dim
    chunk = min(config.chunk_size or default_chunk_size(tokens), tokens)
    whole, rest = divmod(tokens, chunk)

    def chunk_flops(length: int) -> float:
        memory = 4 * length * keys * values + 2 * keys * values
        return memory + 2 * length**2 * (1 + keys + values)

    flops = whole * chunk_flops(chunk) + (chunk_flops(rest) if rest else 0)
    return float(config.num_heads * flops)


def state_bytes(config: XLSTMConfig, batch_size: int) -> int:
    """Bytes of the states of all blocks for `batch_size` rows: C, n and m, or an sLSTM's."""
    width = _BYTES[config.state_dtype]
    memory = config.qk_head_dim * (config.v_head_dim + 1) * width + 4  # m is always float32
    # Four float32 states a channel, and the inputs that the convolution looks back on.
    slstm = config.embedding_dim * (4 * 4 + (CONV_TAPS - 1) * _BYTES[config.dtype])
    row = config.blocks.count("m") * config.num_heads * memory + config.blocks.count("s") * slstm
    return batch_size * row


def cache_bytes(config: XLSTMConfig, batch_size: int, max_length: int) -> int:
    """The states and the slots of pending tokens, for rows of any length."""
    return jax.eval_shape(lambda: init_xlstm_cache(config, batch_size, max_length)).nbytes


def decode_bytes(config: XLSTMConfig, context: int) -> float:
    """All is read at each token; the states are written once for `FOLDED_TOGETHER` tokens."""
    return cache_bytes(config, 1, context) + state_bytes(config, 1) / FOLDED_TOGETHER


def layer_activations(config: XLSTMConfig) -> tuple[float, float]:
    """The residual stream and norms whole; by tensor shard the MLP and what belongs to heads.

    A chunk's state is written and read back, in float32: its share is a token's.
    """
    tokens = 2 * (2 * config.qk_dim + 4 * config.v_dim)  # q, k; v, output gate, cell, gated cell
    state = config.num_heads * config.qk_head_dim * config.v_head_dim * 4 / _BYTES[config.dtype]
    states = 2 * state / (config.chunk_size or CHUNK_SIZE)
    return 10 * config.embedding_dim, 3 * config.intermediate_size + tokens + states


def sequence_bytes(config: XLSTMConfig, tokens: float, rows: float) -> float:
    """The summary of each row's stretch: a state in float32 with its decay."""
    memory = config.qk_head_dim * (config.v_head_dim + 1) + 2
    return rows * config.num_heads * memory * 4
