"""Prompts that return before the order of the data brings them. One policy a file,
`choose(state, results, count, config) -> (prompts, state)`."""
