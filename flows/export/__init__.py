"""What leaves a store: a model as a folder that others load, and one sample with all it came from."""
