"""Tools: what an episode asks of the world with `ctx.call`, one a file."""
