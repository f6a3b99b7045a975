"""The steps of an iteration and everything that they compute."""
