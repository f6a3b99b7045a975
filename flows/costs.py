"""Cost of a run: device-seconds, tokens and money by step, and the wasted part."""
