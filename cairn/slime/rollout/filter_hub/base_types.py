"""Results of filters."""

from cairn.tasks.slime import DynamicFilterOutput as DynamicFilterOutput
