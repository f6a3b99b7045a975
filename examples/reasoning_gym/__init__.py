"""A puzzle of reasoning-gym over several turns: the model is told that it was wrong, and may try again."""
