"""Operations of language models as pure functions on arrays. Imports nothing of `jaxlab`."""

from pallas_kernels.attention import (
    attention,
    attention_reference,
    compiling_for,
    sharded_attention,
)

__all__ = ["attention", "attention_reference", "compiling_for", "sharded_attention"]
