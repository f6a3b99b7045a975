"""slime's `Sample`."""

from cairn.engines.agents.slime import Sample as Sample
