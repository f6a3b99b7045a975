"""A task that a tiny model learns from rewards on two CPU cores within a minute or two."""
