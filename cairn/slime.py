"""What functions written for slime import from it: see docs/coming-from-slime.md."""

from cairn.tasks.slime import DynamicFilterOutput, Sample

__all__ = ["DynamicFilterOutput", "Sample"]
