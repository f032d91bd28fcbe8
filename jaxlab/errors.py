"""Errors a user can cause and mend. Each message names the thing, the value and the remedy."""


class JaxlabError(Exception):
    """Base of every error the `jaxlab` command shows without a traceback (exit code 1)."""


class ConfigError(JaxlabError):
    """A configuration key is unknown, of the wrong type, or contradicts another."""


class MeshError(ConfigError):
    """A device mesh does not fit the devices, the model or the batch."""


class CheckpointError(JaxlabError):
    """A checkpoint is missing, truncated, malformed, or does not fit the model."""


class ArchitectureError(CheckpointError):
    """A checkpoint is of an architecture that jaxlab does not implement."""


class TokenizerError(JaxlabError):
    """A tokenizer is missing, broken, or does not fit the model's vocabulary."""


class DataError(JaxlabError):
    """A data source is missing, empty, or not of the expected form."""


class PromptError(JaxlabError):
    """A prompt cannot be run: empty, or longer than the model's context."""


class NonFiniteLossError(JaxlabError):
    """The training loss became NaN or infinite."""


class StorageError(JaxlabError):
    """Writing to disk failed: no space, no permission."""
