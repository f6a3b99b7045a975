"""The options of a run, one model a section."""
