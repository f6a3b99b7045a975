"""What a client may not ask, since tokens are drawn as the run says: log-probs are of one distribution, and no other is
trained on."""

from collections.abc import Collection, Mapping
from typing import Any

from cairn.engines.capture.errors import BadRequest
from cairn.engines.types import SamplingParams

_NOTHING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "n": (1,),
    "best_of": (1,),
    "seed": (),
    "sampling_seed": (),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "response_format": ({"type": "text"},),
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "structural_tag": (),
    "custom_logit_processor": (),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "functions": ([],),
}
"""Values besides null that change nothing, by the names of fields."""


def refuse_other_sampling(given: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> None:
    """Raise BadRequest where a request would have tokens drawn in another way than `params`. `ignored`: fields that
    the session looks over."""
    own: dict[str, tuple[Any, ...]] = {
        "temperature": (params.temperature,),
        "top_p": (params.top_p,),
        "top_k": (params.top_k,) if params.top_k > 0 else (-1, 0),
    }
    for name, allowed in {**own, **_NOTHING}.items():
        value = given.get(name)
        if value is None or value in allowed or name in ignored:
            continue
        runs = f", where the run has {own[name][0]}" if name in own else ""
        raise BadRequest(
            f"{name}={value!r} is not to be had{runs}, since tokens are drawn as the run says: leave it out, or let "
            f"the session look over it with cairn.capture(…, ignored={{{name!r}}})"
        )


def whole_number(given: Mapping[str, Any], *names: str) -> int | None:
    """The first of some fields that has a value: a positive whole number. Raises BadRequest for another value."""
    for name in names:
        value = given.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name}={value!r} has to be a whole number above 0")
            return value
    return None


def strings(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A field that holds one string or several. Raises BadRequest for another value."""
    value = given.get(name)
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) and one for one in found):
        raise BadRequest(f"{name}={value!r} has to be a string or a list of strings")
    return tuple(found)
