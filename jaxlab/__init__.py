"""jaxlab: one functional JAX core to train, align, compress, serve and study language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "load"]

if TYPE_CHECKING:
    from jaxlab.model import Model, load


def __getattr__(name: str) -> Any:
    # Deferred: `import jaxlab` and `jaxlab --help` need not wait for JAX.
    if name in ("Model", "load"):
        from jaxlab import model

        return getattr(model, name)
    raise AttributeError(f"module 'jaxlab' has no attribute {name!r}")
