"""Anthropic's Messages API."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cairn.engines.agents.capture.openai import text_of
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


class Messages:
    """The API `POST /v1/messages`."""

    def read(self, body: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> ChatRequest:
        """Parse the body of a request. Raises BadRequest for what is not supported."""
        choice = (body.get("tool_choice") or {}).get("type", "auto")
        messages = checked_messages(body, choice, params, ignored)
        system = text_of(body.get("system"), "system")
        converted: list[Message] = [{"role": "system", "content": system}] if system else []
        for number, one in enumerate(messages):
            converted += _messages(one, f"message {number}")
        return ChatRequest(
            messages=tuple(converted),
            tools=() if choice == "none" else tuple(_tool(tool) for tool in body.get("tools") or ()),
            max_new_tokens=whole_number(body, "max_tokens"),
            stop=strings(body, "stop_sequences"),
            model=str(body.get("model") or "policy"),
            stream=bool(body.get("stream")),
        )

    def whole(self, request: ChatRequest, answer: ChatReply) -> dict[str, Any]:
        """Return the response as one JSON object."""
        return {
            **_head(request, answer),
            "content": _blocks(answer),
            "stop_reason": _reason(answer),
            "stop_sequence": answer.stopped_by,
            "usage": _usage(answer),
        }

    def events(self, request: ChatRequest, answer: ChatReply) -> list[str]:
        """Return the response as server-sent events."""
        usage, events = _usage(answer), list[tuple[str, dict[str, Any]]]()
        begun = {**_head(request, answer), "content": [], "stop_reason": None, "stop_sequence": None}
        events.append(("message_start", {"message": {**begun, "usage": {**usage, "output_tokens": 0}}}))
        for index, block in enumerate(_blocks(answer)):
            empty, delta = _start_and_delta(block)
            events.append(("content_block_start", {"index": index, "content_block": empty}))
            events.append(("content_block_delta", {"index": index, "delta": delta}))
            events.append(("content_block_stop", {"index": index}))
        ended = {"stop_reason": _reason(answer), "stop_sequence": answer.stopped_by}
        events.append(("message_delta", {"delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}))
        events.append(("message_stop", {}))
        return [f"event: {kind}\ndata: {json.dumps({'type': kind, **what})}\n\n" for kind, what in events]

    def error(self, message: str, status: int, code: str | None) -> dict[str, Any]:
        """Return the error object for a message."""
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
        return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message}}


def _messages(message: Any, where: str) -> list[Message]:
    """Convert one message to OpenAI's format. Tool results become messages of their own, in front of the user's
    text."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        raise BadRequest(f"{where} has to be an object whose role is user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if not isinstance(content, Sequence) or not all(isinstance(block, Mapping) for block in content):
        raise BadRequest(f"the content of {where} has to be a string or a list of blocks")
    own: Message = {"role": message["role"], "content": ""}
    results, texts, calls = list[Message](), list[Any](), list[dict[str, Any]]()
    for block in content:
        kind = block.get("type")
        if kind == "tool_result" and message["role"] == "user":
            text = text_of(block.get("content"), f"a tool_result of {where}")
            results.append({"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")})
        elif kind == "tool_use" and message["role"] == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            own["reasoning_content"] = block.get("thinking") or ""
        elif kind != "redacted_thinking":
            texts.append(block)
    own["content"] = text_of(texts, where)
    if calls:
        own["tool_calls"] = calls
    return [*results, *([own] if texts or calls or not results else [])]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or "input_schema" not in tool or "name" not in tool:
        raise BadRequest(
            "tools has to be a list of objects with name and input_schema: the service's own tools are not supported"
        )
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _head(request: ChatRequest, answer: ChatReply) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(answer: ChatReply) -> list[dict[str, Any]]:
    reply, blocks = answer.reply, list[dict[str, Any]]()
    if reply.thoughts is not None:
        blocks.append({"type": "thinking", "thinking": reply.thoughts, "signature": ""})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for number, call in enumerate(reply.tool_calls):
        blocks.append({"type": "tool_use", "id": answer.call_id(number), "name": call.name, "input": call.arguments})
    return blocks


def _start_and_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a content block without its content, and the delta that holds all of it."""
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _reason(answer: ChatReply) -> str:
    if answer.is_cut:
        return "max_tokens"
    return "tool_use" if answer.reply.tool_calls else "end_turn" if answer.stopped_by is None else "stop_sequence"


def _usage(answer: ChatReply) -> dict[str, Any]:
    prompt_tokens, cached = len(answer.exchange.prompt_ids), answer.exchange.segment.cached_tokens
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.exchange.segment),
    }
