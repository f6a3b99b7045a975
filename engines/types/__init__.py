"""The words that engines and tasks exchange."""
