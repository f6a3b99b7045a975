"""What a run cost: device-seconds, tokens and money by step, and what was wasted."""
