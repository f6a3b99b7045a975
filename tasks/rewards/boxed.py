r"""Finding the answer in a response."""


def last_boxed(text: str) -> str | None:
    r"""What stands in the last whole `\boxed{…}`, nested braces included; None without one."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        begin, depth = start + len("\\boxed{"), 1
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[begin:end]
        start = text.rfind("\\boxed{", 0, start)
    return None
