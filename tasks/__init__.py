"""Steps of an iteration and all that they compute."""
