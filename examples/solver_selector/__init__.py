"""Several answers side by side, and one that reads them all and picks one."""
