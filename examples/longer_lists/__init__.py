"""A task that a tiny model cannot do at all at first, and learns by a curriculum, on two CPU cores."""
