"""Reading, checking and loading of model folders."""
