"""A puzzle of reasoning-gym over several turns: after a wrong answer the model tries again."""
