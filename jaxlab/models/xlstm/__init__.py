"""xLSTM language models: memory of a fixed size instead of attention."""

from jaxlab.models.xlstm.cache import XLSTMCache, init_xlstm_cache
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.module import XLSTM

__all__ = ["XLSTM", "XLSTMCache", "XLSTMConfig", "init_xlstm_cache"]
