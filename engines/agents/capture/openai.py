"""OpenAI's Chat Completions API."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cairn.engines.agents.capture.protocol import (
    BadRequest,
    ChatReply,
    ChatRequest,
    Message,
    checked_messages,
    strings,
    whole_number,
)
from cairn.engines.types.types import SamplingParams
from cairn.storage.store.canonical import from_json


class ChatCompletions:
    """The API `POST /v1/chat/completions`."""

    def read(self, body: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> ChatRequest:
        """Parse the body of a request. Raises BadRequest for what is not supported."""
        choice = body.get("tool_choice") or "auto"
        messages = checked_messages(body, choice, params, ignored)
        return ChatRequest(
            messages=tuple(_message(one, number) for number, one in enumerate(messages)),
            tools=() if choice == "none" else tuple(_tool(tool) for tool in body.get("tools") or ()),
            max_new_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
            stop=strings(body, "stop"),
            model=str(body.get("model") or "policy"),
            stream=bool(body.get("stream")),
            reports_log_probs=bool(body.get("logprobs")),
            reports_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    def whole(self, request: ChatRequest, answer: ChatReply) -> dict[str, Any]:
        """Return the response as one JSON object."""
        content = answer.reply.content or (None if answer.reply.tool_calls else "")
        message = {"role": "assistant", "content": content, **_more(answer)}
        if calls := _calls(answer):
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _reason(answer),
            "logprobs": _log_probs(request, answer),
        }
        return {**_head(request, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, request: ChatRequest, answer: ChatReply) -> list[str]:
        """Return the response as server-sent events."""
        calls = [{"index": number, **call} for number, call in enumerate(_calls(answer))]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "", **_more(answer)}]
        deltas += [{"content": answer.reply.content}] if answer.reply.content else []
        deltas += [{"tool_calls": [call]} for call in calls]
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        if request.reports_log_probs:
            choices[-1]["logprobs"] = _log_probs(request, answer)
        choices.append({"index": 0, "delta": {}, "finish_reason": _reason(answer)})
        head = _head(request, answer, "chat.completion.chunk")
        chunks = [{**head, "choices": [choice]} for choice in choices]
        chunks += [{**head, "choices": [], "usage": _usage(answer)}] if request.reports_usage else []
        return [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]

    def error(self, message: str, status: int, code: str | None) -> dict[str, Any]:
        """Return the error object for a message."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content, a string or a list of text parts. Raises BadRequest for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"the content of {where} has to be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise BadRequest(f"a part of {where} is of type {kind}, and only text is read")
        texts.append(part["text"])
    return "".join(texts)


def _message(body: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(body, Mapping) or not isinstance(body.get("role"), str):
        raise BadRequest(f"{where} has to be an object with a role")
    role = "system" if body["role"] == "developer" else body["role"]
    message: Message = {"role": role, "content": text_of(body.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if body.get(name):
            message[name] = body[name]
    if role != "assistant":
        return message
    if thoughts := body.get("reasoning_content") or body.get("reasoning"):
        message["reasoning_content"] = thoughts
    if calls := body.get("tool_calls"):
        message["tool_calls"] = [_called(call, where) for call in calls]
    return message


def _called(call: Any, where: str) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = function["name"], function.get("arguments") or {}
    except (KeyError, TypeError, AttributeError):
        raise BadRequest(f"a tool call of {where} has to have a function with a name and arguments") from None
    if isinstance(arguments, str):
        with suppress(ValueError):  # the template receives what the model wrote
            arguments = from_json(arguments)
    converted = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **converted} if call.get("id") else converted


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "name" not in (tool.get("function") or {}):
        raise BadRequest("tools has to be a list of objects of type function, each with a function that has a name")
    return dict(tool)


def _head(request: ChatRequest, answer: ChatReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": request.model}


def _more(answer: ChatReply) -> dict[str, Any]:
    return {} if answer.reply.thoughts is None else {"reasoning_content": answer.reply.thoughts}


def _calls(answer: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": answer.call_id(number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(answer.reply.tool_calls)
    ]


def _reason(answer: ChatReply) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.reply.tool_calls else "stop"


def _log_probs(request: ChatRequest, answer: ChatReply) -> dict[str, Any] | None:
    if not request.reports_log_probs:
        return None
    log_probs = answer.exchange.segment.log_probs
    assert log_probs is not None
    return {
        "content": [
            {"token": token, "logprob": float(log_prob), "bytes": [*token.encode()], "top_logprobs": []}
            for token, log_prob in zip(answer.tokens, log_probs, strict=True)
        ],
        "refusal": None,
    }


def _usage(answer: ChatReply) -> dict[str, Any]:
    prompt_tokens, sampled = len(answer.exchange.prompt_ids), len(answer.exchange.segment)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.exchange.segment.cached_tokens},
    }
