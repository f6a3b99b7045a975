"""Log-probs of given tokens from a model that a server holds: one wire format a file, and what asks in any of them."""
