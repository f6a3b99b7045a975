"""Exports from a store: a model as a folder that other programs load, and one sample with everything it came from."""
