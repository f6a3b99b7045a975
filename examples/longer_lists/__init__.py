"""A task that a tiny model cannot do at all to begin with, and learns by a curriculum, on two CPU cores."""
