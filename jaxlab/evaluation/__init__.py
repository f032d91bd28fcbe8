"""What a trained model can do, in numbers."""

from jaxlab.evaluation.perplexity import PerplexityResult, perplexity, text_perplexity

__all__ = ["PerplexityResult", "perplexity", "text_perplexity"]
