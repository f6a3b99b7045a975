"""Modules that functions written for slime import, under slime's names too: see docs/coming-from-slime.md.

Code that Cairn loads finds this package as `slime`. Modules that are not here come from a slime on the import path.
"""

from pkgutil import extend_path

from cairn.engines.agents.slime import GenerateState, Sample, get_model_url, post
from cairn.tasks.slime import DynamicFilterOutput

__path__ = extend_path(__path__, __name__)
__all__ = ["DynamicFilterOutput", "GenerateState", "Sample", "get_model_url", "post"]
