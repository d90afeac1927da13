"""Reads the bodies of OpenAI's requests, and writes its answers.

Log-probabilities are of single tokens. A character may be several of them: each has its own bytes, which together are
the text's.
"""

from __future__ import annotations

import codecs
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid3d.generation.agents.history import Call, CallPrompt, CallResult, PromptText, PromptTokens, RefusedCall
from hybrid3d.generation.agents.sessions import Session
from hybrid3d.rl.token_texts import decode_part

# What a request may set to other values than these would make samples of another distribution than the policy's, which
# training could not learn from, or more than one reply.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "suffix": ("",),
    "echo": (False,),
    "top_logprobs": (0,),
    "ignore_eos": (False,),
}
SAMPLING: Mapping[str, tuple[Any, ...]] = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}  # the values that are off
# Has no effect: the seed of a request is its session's
IGNORED = {"user", "metadata", "store", "seed", "parallel_tool_calls", "service_tier", "safety_identifier"}
READ = {
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "stop", "stream"),
    *("stream_options", "logprobs", "return_token_ids", "include_stop_str_in_output"),
}
MAX_STOPS = 4  # as OpenAI's API has it
MAX_STOP_CHARS = 1000

CONTEXT = 1024  # tokens before a text that are looked at: only where none of them has any text, more would count
REPLACEMENT = "\ufffd"  # what an incomplete character is decoded as
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# How byte-level BPE writes bytes (GPT-2): printable ones as themselves, the others as the characters from 256 on
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte of a character that it lacks


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    call: Call
    model: str
    is_chat: bool  # whether it is for `/v1/chat/completions`
    streams: bool  # whether the answer is sent as events
    usage: bool  # whether these events have the usage; an answer in one piece always has it
    logprobs: bool  # whether the answer has them
    token_ids: bool  # whether the answer has them


def read_request(body: Mapping[str, Any], is_chat: bool, session: Session, model: str, tokenizer_size: int) -> Request:
    """Return the request of a JSON object. RefusedCall says why it cannot be answered; NoChatTemplate: as `render`."""
    for key, value in body.items():
        if key in NEUTRAL and value is not None and value not in NEUTRAL[key]:
            raise RefusedCall(_refusal(key, value), "unsupported_value", key)
        if key not in NEUTRAL and key not in SAMPLING and key not in READ and key not in IGNORED:
            raise RefusedCall(f"unknown parameter: {key}", "unknown_parameter", key)
    if body.get("model") != model:
        problem = f"the model {body.get('model')!r} does not exist: this run's is {model!r}"
        raise RefusedCall(problem, "model_not_found", "model")
    _check_sampling(body, session)
    most = _number(body, "max_completion_tokens") or _number(body, "max_tokens")
    return Request(
        call=Call(
            prompt=_chat(body, session) if is_chat else _prompt(body, tokenizer_size),
            max_tokens=most if most is not None or is_chat else 16,  # OpenAI's default for completions
            stops=_stops(body),
            include_stop=_flag(body, "include_stop_str_in_output"),
        ),
        model=model,
        is_chat=is_chat,
        streams=_flag(body, "stream"),
        usage=_usage_wanted(body),
        logprobs=_flag(body, "logprobs") if is_chat else _logprobs_wanted(body),
        token_ids=_flag(body, "return_token_ids"),
    )


def _check_sampling(body: Mapping[str, Any], session: Session) -> None:
    """Check that a request asks for the distribution that its session is sampled from, if it asks for one."""
    sampling, temperature = session.sampling, body.get("temperature")
    if temperature not in (None, sampling.temperature) and session.seed is not None:
        problem = f"temperature={temperature!r}: this session samples at temperature={sampling.temperature:g}"
        raise RefusedCall(f"{problem}: leave it out", "unsupported_value", "temperature")
    for key, off in SAMPLING.items():
        value, own = body.get(key), getattr(sampling, key)
        if value is None or value == own or (own in off and value in off):
            continue
        if own in off:
            raise RefusedCall(_refusal(key, value), "unsupported_value", key)
        problem = f"{key}={value!r}: this session samples at {key}={own:g}: leave it out"
        raise RefusedCall(problem, "unsupported_value", key)


def _refusal(key: str, value: Any) -> str:
    if key in ("tools", "functions", "tool_choice", "response_format"):
        return f"{key}: replies are plain text here: describe tools and formats in the messages, and read them yourself"
    neutral = {**NEUTRAL, **SAMPLING}[key][0]
    return f"{key}={value!r}: samples are those of the policy's own distribution, one a call: set {neutral!r}"


def _chat(body: Mapping[str, Any], session: Session) -> CallPrompt:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedCall("messages: expected a list of one or more messages", "invalid_value", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RefusedCall(f"messages[{i}]: expected an object with a role", "invalid_value", "messages")
        content = message.get("content")
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            messages[i] = message | {"content": "".join(part["text"] for part in content)}
        elif content is not None and not isinstance(content, str):
            raise RefusedCall(f"messages[{i}].content: expected text", "invalid_value", "messages")
    return PromptText(_valid(session.history.render(tuple(messages)), "messages"), tuple(messages))


def _prompt(body: Mapping[str, Any], tokenizer_size: int) -> CallPrompt:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return PromptText(_valid(prompt, "prompt"))
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token < tokenizer_size for token in prompt):
        return PromptTokens(tuple(prompt))
    expected = f"expected one text, or one list of token ids from 0 to {tokenizer_size - 1}"
    raise RefusedCall(f"prompt: {expected}", "invalid_value", "prompt")


def _valid(text: str, param: str) -> str:
    """Return a text if it is one: JSON can have halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedCall(f"{param}: a half of a surrogate pair is no text", "invalid_value", param) from None
    return text


def _number(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise RefusedCall(f"{key}={value!r}: expected a number of 1 or more", "invalid_value", key)
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value not in (None, True, False):
        raise RefusedCall(f"{key}={value!r}: expected true or false", "invalid_value", key)
    return bool(value)


def _usage_wanted(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RefusedCall("stream_options: expected an object", "invalid_value", "stream_options")
    return _flag(options, "include_usage")


def _logprobs_wanted(body: Mapping[str, Any]) -> bool:
    """Return whether a completion has log-probabilities: 0 or more alternatives to each token, of which 0 are here."""
    value = body.get("logprobs")
    if value is None or value is False:
        return False
    if value not in (0, 1):
        problem = f"logprobs={value!r}: no alternatives to tokens are given: set 0"
        raise RefusedCall(problem, "invalid_value", "logprobs")
    return True


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RefusedCall("stop: expected a text, or a list of texts", "invalid_value", "stop")
    if len(stops) > MAX_STOPS:
        raise RefusedCall(f"stop: {len(stops)} texts, at most {MAX_STOPS}", "invalid_value", "stop")
    for stop in stops:
        _valid(stop, "stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise RefusedCall(f"stop: {longest} characters, at most {MAX_STOP_CHARS}", "invalid_value", "stop")
    return tuple(stops)


# --- answers -------------------------------------------------------------------------------------------------------


def answer(request: Request, result: CallResult, tokenizer: Any) -> dict[str, Any]:
    """Return the answer to a request as a JSON object."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": result.finish_reason}
    if request.is_chat:
        choice["message"] = {"role": "assistant", "content": result.text}
    else:
        choice["text"] = result.text
    choice["logprobs"] = _logprobs(request, result, tokenizer)
    found = _head(request, "chat.completion" if request.is_chat else "text_completion")
    prompt, completion = len(result.prompt_ids), len(result.tokens)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    found |= {"choices": [choice], "usage": usage}
    if request.token_ids:
        choice["token_ids"] = list(result.tokens)
        (found if request.is_chat else choice)["prompt_token_ids"] = list(result.prompt_ids)
    return found


def events(request: Request, result: CallResult, tokenizer: Any) -> Iterator[str]:
    """Yield the server-sent events of an answer, which arrives when it is complete."""
    head = _head(request, "chat.completion.chunk" if request.is_chat else "text_completion")
    whole = answer(request, result, tokenizer)
    choice = whole["choices"][0]
    if request.is_chat:
        choice["delta"] = choice.pop("message")
    ids = {"prompt_token_ids": whole["prompt_token_ids"]} if "prompt_token_ids" in whole else {}
    yield _event(head | ids | {"choices": [choice | {"finish_reason": None}]})
    last: dict[str, object] = {"delta": {}} if request.is_chat else {"text": ""}
    end = {"index": 0, "finish_reason": result.finish_reason, "logprobs": None}
    yield _event(head | {"choices": [last | end]})
    if request.usage:
        yield _event(head | {"choices": [], "usage": whole["usage"]})
    yield "data: [DONE]\n\n"


def _head(request: Request, kind: str) -> dict[str, Any]:
    id_ = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": id_, "object": kind, "created": int(time.time()), "model": request.model}


def _logprobs(request: Request, result: CallResult, tokenizer: Any) -> dict[str, Any] | None:
    if not request.logprobs or not result.logprobs:  # a greedy session has none
        return None
    tokens = list(split_bytes(tokenizer, result.tokens, result.prompt_ids))
    if not request.is_chat:
        names = [token.name if token.text is not None or token.special else f"bytes:{token.name}" for token in tokens]
        offsets, logprobs = [token.offset for token in tokens], list(result.logprobs)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
    content = [
        {"token": token.name, "logprob": logprob, "bytes": list(token.bytes), "top_logprobs": []}
        for token, logprob in zip(tokens, result.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


# --- tokens --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenBytes:
    """What a token is in a text.

    Attributes:
        text: what it adds to the text; None if it has a part of a character, or is special.
        bytes: that it adds to the text in UTF-8.
        offset: the number of the character that it begins in, within the text.
        special: what a special token is called; "" for others.
    """

    text: str | None
    bytes: bytes
    offset: int
    special: str = ""

    @property
    def name(self) -> str:
        r"""The token as OpenAI's API names it: its text, or the bytes of a part of a character as `\xf0\x9f`."""
        if self.special:
            return self.special
        return self.text if self.text is not None else "".join(f"\\x{byte:02x}" for byte in self.bytes)


def split_bytes(tokenizer: Any, tokens: Sequence[int], before: Sequence[int]) -> Iterator[TokenBytes]:
    """Yield what each of some tokens is in the text that they add to the tokens before them."""
    offset, start, whole = 0, 0, [*before, *tokens]
    for end in range(1, len(tokens) + 1):
        at = len(before) + start
        group, front = tokens[start:end], whole[max(0, at - CONTEXT) : at]
        text = decode_part(tokenizer, group, front)
        if text.endswith(REPLACEMENT) and end < len(tokens):
            continue  # the rest of the character follows
        if not text and len(group) == 1:
            yield TokenBytes(None, b"", offset, special=str(tokenizer.decode(group)))
        elif len(group) == 1 and not text.endswith(REPLACEMENT):
            yield TokenBytes(text, text.encode(), offset)
        else:
            yield from _split_group(tokenizer, group, text, offset)
        offset, start = offset + len(text), end


def _split_group(tokenizer: Any, group: Sequence[int], text: str, offset: int) -> Iterator[TokenBytes]:
    """Yield what each token is of a text that several have together, by the bytes that the vocabulary says they have.

    If these are not the text, the last token has all of it.
    """
    parts = [_written_bytes(tokenizer, token) for token in group]
    if b"".join(parts).decode("utf-8", "replace") != text:
        parts = [*[b""] * (len(group) - 1), text.encode()]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for part in parts:
        pending = decoder.getstate()[0]
        complete = decoder.decode(part)
        is_whole = not pending and not decoder.getstate()[0] and REPLACEMENT not in complete
        yield TokenBytes(complete if is_whole and part else None, part, offset)
        offset += len(complete)


def _written_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token by how the vocabulary writes it."""
    written = str(tokenizer.convert_ids_to_tokens(int(token)))
    if fallback := _FALLBACK.fullmatch(written):
        return bytes([int(fallback[1], 16)])
    if all(character in _BYTE_OF for character in written):
        return bytes(_BYTE_OF[character] for character in written)
    return written.replace("▁", " ").encode()
