"""Which prompts come back before the data's order brings them. One policy a file,
`choose(state, results, count, config) -> (prompts, state)`."""
