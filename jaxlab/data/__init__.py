"""Text and chat documents in; packed, shuffled, process-sharded batches of tokens out.

Importing this package costs nothing but pydantic: grain, datasets and the tokenizers are imported
by the first name that needs them.
"""

from jaxlab.data.config import DataConfig

_WHERE = {
    "DataPipeline": "pipeline",
    "make_pipeline": "pipeline",
    "open_split": "sources",
    "render_row": "inspection",
    "Tokenizer": "tokenizers",
    "load_tokenizer": "tokenizers",
    "unigram_entropy": "statistics",
}

__all__ = ["DataConfig", *_WHERE]


def __getattr__(name: str):
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f"jaxlab.data.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
