"""The OpenAI form of requests, answers and errors, apart from HTTP and from the engine.

What a request may say is listed here with its type; what is known and cannot be served is refused
with the reason; what is unknown is ignored, as clients send much that does not matter.
"""
from __future__ import annotations

import time
from typing import Any

_NUMBER = (int, float)
# parameter -> (types, lowest, highest); a list or dict is only looked at by its type
_COMMON: dict[str, tuple[tuple[type, ...], float | None, float | None]] = {
    "temperature": (_NUMBER, 0, 100), "top_p": (_NUMBER, 0, 1), "min_p": (_NUMBER, 0, 1),
    "top_k": ((int,), 0, None), "stream": ((bool,), None, None),
    "stop": ((str, list), None, None), "seed": ((int,), None, None),
    "max_tokens": ((int,), 1, None), "presence_penalty": (_NUMBER, -2, 2),
    "frequency_penalty": (_NUMBER, -2, 2), "repeat_penalty": (_NUMBER, 0, None),
    "logit_bias": ((dict,), None, None), "n": ((int,), 1, None),
    "stream_options": ((dict,), None, None), "model": ((str,), None, None),
}
_CHAT = {**_COMMON, "messages": ((list,), None, None), "max_completion_tokens": ((int,), 1, None),
         "tools": ((list,), None, None), "tool_choice": ((str, dict), None, None),
         "response_format": ((dict,), None, None)}
_TEXT = {**_COMMON, "prompt": ((str, list), None, None), "suffix": ((str,), None, None),
         "echo": ((bool,), None, None), "best_of": ((int,), 1, None)}
_OURS = ("n", "best_of", "stream_options", "model", "max_completion_tokens")  # not the engine's


class ApiError(Exception):
    """An answer that is an error: HTTP status, and the fields of OpenAI's error object."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error",
                 param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param,
                          "code": self.code}}


def refused(error: ValueError, chat: bool) -> ApiError:
    """What the engine would not take."""
    too_long = "exceed context window" in str(error)
    return ApiError(400, str(error), param="messages" if chat else "prompt",
                    code="context_length_exceeded" if too_long else None)


def _check(name: str, value: Any, rule: tuple) -> None:
    types, low, high = rule
    wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    if wrong:
        want = " or ".join(t.__name__ for t in types)
        raise ApiError(400, f"'{name}' must be of type {want}", param=name)
    if low is not None and value < low or high is not None and value > high:
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ApiError(400, f"'{name}' is {value}; it must be {bounds}", param=name)


def parse(body: Any, chat: bool) -> dict[str, Any]:
    """Arguments for create_chat_completion() or create_completion(), and "_usage": whether a
    stream ends with a chunk of usage. ApiError names the parameter."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    rules = _CHAT if chat else _TEXT
    given = {name: body[name] for name in rules if body.get(name) is not None}
    for name, value in given.items():
        _check(name, value, rules[name])
    for name in ("n", "best_of"):
        if given.get(name, 1) != 1:
            raise ApiError(400, f"'{name}' must be 1: one answer at a time", param=name)
    if body.get("logprobs"):
        raise ApiError(400, "'logprobs' is not supported", param="logprobs")
    if chat:
        _check_messages(given.get("messages"))
        if "max_completion_tokens" in given:
            given["max_tokens"] = given["max_completion_tokens"]
    else:
        given["prompt"] = _prompt(given.get("prompt"))
        given.setdefault("max_tokens", 16)
    options = given.get("stream_options", {})
    out = {name: value for name, value in given.items() if name not in _OURS}
    out["_usage"] = bool(options.get("include_usage"))
    return out


def _check_messages(messages: Any) -> None:
    if not messages:
        raise ApiError(400, "'messages' must be a list of at least one message", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{i}] has no role", param=f"messages[{i}].role")
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                raise ApiError(400, f"messages[{i}] holds something else than text; only text is "
                               "supported", param=f"messages[{i}].content")
            message["content"] = "".join(str(part.get("text", "")) for part in content)
        elif content is not None and not isinstance(content, str):
            raise ApiError(400, f"messages[{i}].content must be text",
                           param=f"messages[{i}].content")
        elif content is None and not message.get("tool_calls"):
            raise ApiError(400, f"messages[{i}] has no content", param=f"messages[{i}].content")


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) or isinstance(prompt, list) and prompt and all(
            isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in prompt):
        return prompt
    raise ApiError(400, "'prompt' must be one text or one list of token numbers", param="prompt")


def models(name: str, since: int) -> dict[str, Any]:
    """The answer of /v1/models."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": since,
                                        "owned_by": "kvtier"}]}


def usage(counts: dict[str, int]) -> dict[str, Any]:
    """The usage object; cached_tokens were in the context already or loaded."""
    prompt, made = counts["prompt_tokens"], counts["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": counts["cached_tokens"]}}


def usage_chunk(last: dict[str, Any] | None, name: str, chat: bool,
                counts: dict[str, int]) -> dict[str, Any]:
    """The chunk that ends a stream when include_usage was asked for."""
    last = last or {}
    return {"id": last.get("id", ""), "created": last.get("created", int(time.time())),
            "object": "chat.completion.chunk" if chat else "text_completion", "model": name,
            "choices": [], "usage": usage(counts)}
