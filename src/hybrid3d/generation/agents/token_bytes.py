"""The bytes of single tokens and where they stand in the text, for log-probabilities in OpenAI's form.

A character may be several tokens. Each has its own bytes, which together are the text's.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid3d.rl.token_texts import decode_part

CONTEXT = 1024  # tokens before a text that are looked at: only where none of them has any text, more would count
REPLACEMENT = "\ufffd"  # what an incomplete character is decoded as
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# How byte-level BPE writes bytes (GPT-2): printable ones as themselves, the others as the characters from 256 on
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte of a character that it lacks


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
