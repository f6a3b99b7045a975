"""SGLang's own `/generate`: `return_logprob` with `logprob_start_len` gives the log-prob and the id of every token of
the input from there on, and `top_logprobs_num` those of the most probable ones in its place."""

from collections.abc import Sequence
from typing import Any

from cairn.engines.scoring.formats import Scored


class SGLang:
    """Nothing is generated: `max_new_tokens` is 0."""

    path = "/generate"

    def body(self, name: str, ids: Sequence[int], scored: int, top_k: int = 0) -> dict[str, Any]:
        """See `Format.body`. The first token from `logprob_start_len` on may have none, so it is one before."""
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(ids) - scored - 1,
            **({"top_logprobs_num": top_k} if top_k else {}),
        }

    def read(self, answer: Any, given: int, scored: int) -> Scored:
        """See `Format.read`."""
        told = answer["meta_info"]
        found, top = told["input_token_logprobs"][-scored:], told.get("input_top_logprobs")
        return Scored([entry[0] for entry in found], [entry[1] for entry in found], None, top and top[-scored:])
