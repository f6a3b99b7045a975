"""`/v1/completions` of OpenAI's interface, as vLLM and others serve it: `echo` with `logprobs` gives the log-prob of
every token of the prompt, which is given as token ids.

One token has to be generated and is passed over. vLLM says which tokens they are (`return_tokens_as_token_ids`); who
does not know that option says their texts.
"""

from collections.abc import Sequence
from typing import Any

from cairn.engines.scoring.formats import Scored

_ID = "token_id:"


class OpenAI:
    """Completions, not chats: those take no tokens."""

    path = "/v1/completions"

    def body(self, name: str, ids: Sequence[int], scored: int, top_k: int = 0) -> dict[str, Any]:
        """See `Format.body`; `top_k` is passed over."""
        return {
            "model": name,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }

    def read(self, answer: Any, given: int, scored: int) -> Scored:
        """See `Format.read`."""
        found = answer["choices"][0]["logprobs"]
        said, values = found["tokens"], found["token_logprobs"]
        if not given <= len(said) <= given + 1:
            return Scored(values, said, None)
        said, values = said[given - scored : given], values[given - scored : given]
        if all(str(token).startswith(_ID) for token in said):
            return Scored(values, [int(token.removeprefix(_ID)) for token in said], None)
        return Scored(values, None, said)
