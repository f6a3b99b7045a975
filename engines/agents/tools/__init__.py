"""Tools, which an episode calls with `ctx.call`; one built-in tool per file."""
