"""Names that functions written for slime import: see docs/coming-from-slime.md."""

from cairn.engines.agents.slime import GenerateState, Sample, get_model_url, post
from cairn.tasks.slime import DynamicFilterOutput

__all__ = ["DynamicFilterOutput", "GenerateState", "Sample", "get_model_url", "post"]
