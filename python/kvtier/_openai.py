"""The OpenAI form of requests, answers and errors, apart from HTTP and from the engine.

What a request may say is listed here with its type; what is known and cannot be served is refused
with the reason; what is unknown is ignored, as clients send much that does not matter.
"""
from __future__ import annotations

import math
import time
from typing import Any

_NUMBER = (int, float)
_INT_MAX = 2**31 - 1  # the engine's int
# parameter -> (types, lowest, highest); a list or dict is only looked at by its type
_COMMON: dict[str, tuple[tuple[type, ...], float | None, float | None]] = {
    "temperature": (_NUMBER, 0, 100), "top_p": (_NUMBER, 0, 1), "min_p": (_NUMBER, 0, 1),
    "top_k": ((int,), 0, _INT_MAX), "stream": ((bool,), None, None),
    "stop": ((str, list), None, None), "seed": ((int,), -2**63, 2**64 - 1),
    "max_tokens": ((int,), 1, None), "presence_penalty": (_NUMBER, -2, 2),
    "frequency_penalty": (_NUMBER, -2, 2), "repeat_penalty": (_NUMBER, 0, 100),
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
    if low is not None and not value >= low or high is not None and not value <= high:
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ApiError(400, f"'{name}' is {str(value)[:40]}; it must be {bounds}", param=name)


def no_number(name: str) -> Any:
    """For json.loads(): NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is no number")


def _check_inside(given: dict[str, Any]) -> None:
    """What lists and mappings hold, where the engine would stumble over it."""
    stop = given.get("stop", ())
    stops = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) and text for text in stops):
        raise ApiError(400, "'stop' must be one text or a list of texts, none of them empty",
                       param="stop")
    for token, bias in given.get("logit_bias", {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10) or \
                not isinstance(bias, _NUMBER) or not math.isfinite(bias):
            raise ApiError(400, "'logit_bias' must map token numbers to numbers",
                           param="logit_bias")
    for name in ("prompt", "suffix"):
        _check_text(name, given.get(name))


def _check_text(name: str, text: Any) -> None:
    """A lone surrogate can be written in JSON, and is no text."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, f"'{name}' is no text: {error}", param=name) from None


def parse(body: Any, chat: bool, vocabulary: int = _INT_MAX) -> dict[str, Any]:
    """Arguments for create_chat_completion() or create_completion(), and "_usage": whether a
    stream ends with a chunk of usage. Tokens are below `vocabulary`. ApiError names the parameter.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    rules = _CHAT if chat else _TEXT
    given = {name: body[name] for name in rules if body.get(name) is not None}
    for name, value in given.items():
        _check(name, value, rules[name])
    for name in ("n", "best_of"):
        if given.get(name, 1) != 1:
            raise ApiError(400, f"'{name}' must be 1: one answer at a time", param=name)
    for name in ("logprobs", "top_logprobs"):  # of a completion 0 asks for them too
        value = body.get(name)
        if value is not None and value is not False and not (chat and value == 0):
            raise ApiError(400, f"'{name}' is not supported: log probabilities are not kept",
                           param=name)
    _check_inside(given)
    if chat:
        _check_messages(given.get("messages"))
        if "max_completion_tokens" in given:
            given["max_tokens"] = given["max_completion_tokens"]
    else:
        given["prompt"] = _prompt(given.get("prompt"), vocabulary)
        given.setdefault("max_tokens", 16)
    if "seed" in given:
        given["seed"] %= 1 << 32  # what the engine has of it
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
            if any(not isinstance(part.get("text"), str) for part in content):
                raise ApiError(400, f"messages[{i}] has a part without text",
                               param=f"messages[{i}].content")
            message["content"] = "".join(part["text"] for part in content)
        elif content is not None and not isinstance(content, str):
            raise ApiError(400, f"messages[{i}].content must be text",
                           param=f"messages[{i}].content")
        elif content is None and not message.get("tool_calls"):
            raise ApiError(400, f"messages[{i}] has no content", param=f"messages[{i}].content")
        _check_text(f"messages[{i}].content", message.get("content"))
        if not isinstance(message.get("tool_calls", []), (list, type(None))):
            raise ApiError(400, f"messages[{i}].tool_calls must be a list",
                           param=f"messages[{i}].tool_calls")


def _prompt(prompt: Any, vocabulary: int) -> Any:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if prompt == "":
        raise ApiError(400, "'prompt' is empty: there is nothing to continue", param="prompt")
    if isinstance(prompt, str) or isinstance(prompt, list) and prompt and all(
            isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in prompt):
        if not isinstance(prompt, str) and max(prompt) >= vocabulary:
            raise ApiError(400, f"'prompt' holds a token that the model has not: it has "
                           f"{vocabulary}", param="prompt")
        _check_text("prompt", prompt)
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
