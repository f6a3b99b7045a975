"""Text that others wrote, for terminals and for Markdown."""
