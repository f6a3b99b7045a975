"""Tools: what an episode asks of the world with `ctx.call`, and the tools of ours, one file each."""
