"""SGLang's own `/generate`: `return_logprob` with `logprob_start_len` gives the log-prob and the id of every token of
the input from there on."""

from collections.abc import Sequence
from typing import Any

from cairn.engines.scoring.formats import Scored


class SGLang:
    """Nothing is generated: `max_new_tokens` is 0."""

    path = "/generate"

    def body(self, name: str, ids: Sequence[int], scored: int) -> dict[str, Any]:
        """See `Format.body`. The first token from `logprob_start_len` on may have none, so it is one before."""
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(ids) - scored - 1,
        }

    def read(self, answer: Any, given: int, scored: int) -> Scored:
        """See `Format.read`."""
        found = answer["meta_info"]["input_token_logprobs"][-scored:]
        return Scored([entry[0] for entry in found], [entry[1] for entry in found], None)
