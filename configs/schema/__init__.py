"""Options of a run, one module for each group of sections."""
