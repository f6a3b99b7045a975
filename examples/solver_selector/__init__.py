"""Several concurrent answers, and a selector that reads them all and picks one."""
