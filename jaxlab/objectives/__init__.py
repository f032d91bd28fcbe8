"""Pure losses: functions of parameters, a batch and a random key."""

from jaxlab.objectives.cross_entropy import chunked_cross_entropy, cross_entropy
from jaxlab.objectives.language_modeling import Objective, language_modeling

__all__ = ["Objective", "chunked_cross_entropy", "cross_entropy", "language_modeling"]
