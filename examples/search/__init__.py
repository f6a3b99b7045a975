"""A tiny model learns, from rewards alone, to look up what it does not know, on two CPU cores."""
