"""What a client is told."""


class BadRequest(Exception):
    """What a client asks is not to be had. The session goes on."""

    def __init__(self, told: str, *, status: int = 400, code: str | None = None) -> None:
        """`told`: one sentence. `code`: as OpenAI's API has it."""
        super().__init__(told)
        self.status = status
        self.code = code


class SessionOver(BadRequest):
    """The session has ended."""

    def __init__(self) -> None:
        super().__init__("this session has ended: its sample has what it is made of", status=410, code="session_over")
