"""Ray: every engine of a run as actors, placed, named, watched and replaced."""
