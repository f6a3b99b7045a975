"""What makes up for tokens that another policy sampled than the one that is trained, or the same one in another engine.
One correction a file, `correct(tokens, config) -> (weights, metrics)`: see `cairn.engines.training.losses.protocol`.
"""
