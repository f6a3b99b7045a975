"""A task of reasoning-gym that a tiny model learns from rewards alone, on two CPU cores."""
