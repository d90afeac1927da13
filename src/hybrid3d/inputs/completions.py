"""Asks a server with OpenAI's completions API, such as vLLM's, for the log-probabilities of given tokens."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from hybrid3d.errors import UserMistake

KEY_VARIABLE = "TEACHER_API_KEY"
SECONDS = 300.0  # for an answer, which waits for those that were asked for before
ATTEMPTS, PAUSE_SECONDS = 4, 2.0  # each pause between two attempts is twice as long as the one before it
BUSY = (429, 502, 503, 504)  # status codes of a server, or of a proxy before it, that may answer later
SHOWN_BYTES = 300


class EndpointError(UserMistake):
    """Raised when a server cannot be reached, refuses a request, or answers something else."""

    raised_on_all_ranks = True  # those that train agree on it, and so finish the checkpoint that is being written


class Completions:
    """A server of one model, which messages call by the name of its `setting`.

    The variable `TEACHER_API_KEY`, if it is set, is sent as the bearer token. Methods raise `EndpointError` if the
    server does not answer as it should.
    """

    def __init__(self, url: str, setting: str):
        self.url, self._setting = url.rstrip("/"), setting

    def model(self) -> str:
        """Return the name of the server's model; EndpointError if it has none or several."""
        names = self._read(self._send("/models", None), lambda found: [str(one["id"]) for one in found["data"]])
        if len(names) != 1:
            raise self._error(f"serves {len(names)} models ({', '.join(names)}), expected one: serve the teacher alone")
        return str(names[0])

    def logprobs(self, model: str, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token of each sequence given those before it; the first one's is 0."""
        request = {
            "model": model,
            "prompt": [list(sequence) for sequence in sequences],
            "max_tokens": 0,  # nothing is generated: the prompt's own tokens are scored
            "echo": True,
            "logprobs": 0,
            "return_token_ids": True,  # so that vLLM makes no texts
            "temperature": 1.0,
        }

        def read(found: Any) -> list[list[float]]:
            choices = sorted(found["choices"], key=lambda choice: int(choice["index"]))
            return [[0.0, *map(float, choice["logprobs"]["token_logprobs"][1:])] for choice in choices]

        rows: list[list[float]] = self._read(self._send("/completions", request), read)
        counts, expected = [len(row) for row in rows], [len(sequence) for sequence in sequences]
        if counts != expected:
            raise self._error(f"returned log-probabilities of {counts} tokens, expected {expected}")
        return rows

    def _send(self, path: str, body: Any) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        for attempt in range(ATTEMPTS):
            try:
                with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                said = error.read(SHOWN_BYTES).decode(errors="replace")
                problem, may_pass = f"answered {path} with status {error.code}: {said}", error.code in BUSY
            except TimeoutError:  # it is there, and asking again would take as long
                problem, may_pass = f"does not answer {path} within {SECONDS:g} s", False
            except (OSError, http.client.HTTPException, ValueError) as error:
                timed_out = isinstance(getattr(error, "reason", None), TimeoutError)  # while connecting
                problem, may_pass = f"does not answer {path}: {error}", not (timed_out or isinstance(error, ValueError))
            if not may_pass or attempt + 1 == ATTEMPTS:
                raise self._error(problem)
            time.sleep(PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _read(self, answer: bytes, read: Any) -> Any:
        try:
            return read(json.loads(answer))
        except (ValueError, KeyError, TypeError, IndexError):
            said = answer[:SHOWN_BYTES].decode(errors="replace")
            raise self._error(f"gave an answer that is not of OpenAI's completions API: {said}") from None

    def _error(self, what: str) -> EndpointError:
        return EndpointError(f"{self._setting} {self.url} {what}")


def check_server(url: str, setting: str, vocab_size: int) -> None:
    """Raise `EndpointError` unless a server answers, has one model, and reads all tokens of a vocabulary."""
    server = Completions(url, setting)
    server.logprobs(server.model(), [[0, vocab_size - 1]])
