"""The HTTP server of a replica's sessions: OpenAI's API below the address of each session."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hybrid3d import launch_environment
from hybrid3d.config import Agents
from hybrid3d.generation.agents.history import NoChatTemplate, NoSession, RefusedCall, RunEnded
from hybrid3d.generation.agents.program import KEY_VARIABLE, LOCAL_HOSTS, find_agent_problems
from hybrid3d.generation.agents.requests import answer, events, read_request
from hybrid3d.generation.agents.sessions import SessionPool
from hybrid3d.scoring.functions import LARGEST_REWARD

T = TypeVar("T")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]

TAKE_SECONDS = 30.0  # for which a request for a session waits, before it is told to ask again
DISCONNECT_SECONDS = 0.5  # between two looks at whether a client is still there
KEEP_ALIVE_SECONDS = 3600  # closing an idle connection would fail the request that a client is sending on it
CLOSE_SECONDS = 2  # within which answers end when the server does
MAX_BODY_BYTES = 2**23
MAX_DIGITS = 20  # of the number of a body's bytes
CLOSED_SECONDS = 0.02  # within which it is known that a client has asked for a session and gone at once
BACKLOG = 1024  # connections that wait to be accepted


class _Json(JSONResponse):
    """An answer of ASCII characters: a request can have halves of characters, which its answer repeats."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


class CannotListen(RuntimeError):
    """The address of the endpoint cannot be bound, or agents cannot use it."""


class EndpointServer:
    """Serves the sessions of a pool, in threads of this process, at `url`.

    Attributes:
        key: which agents need; the user's, or that of this run.

    Raises:
        CannotListen: the address cannot be bound, or agents cannot use it.
    """

    def __init__(self, pool: SessionPool, model: str, tokenizer: Any, settings: Agents, offset: int):
        """Listen at the recipe's port plus `offset`; requests name the model `model`."""
        self._pool, self._model, self._tokenizer = pool, model, tokenizer
        self._size = len(tokenizer)
        self.key = os.environ.get(KEY_VARIABLE) or launch_environment.derived_key("agents")
        self._is_local = settings.host in LOCAL_HOSTS
        problems = find_agent_problems(settings)  # on this machine
        if problems:
            raise CannotListen("; ".join(problems))
        self._socket = _listen(settings.host, settings.port + offset)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            self._application(),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell clients that the run has ended, and stop."""
        self._pool.close()
        self._server.should_exit = True
        self._thread.join(2 * CLOSE_SECONDS)
        self._socket.close()

    def _application(self) -> Starlette:
        chat, complete = (partial(self._generate, is_chat=is_chat) for is_chat in (True, False))
        return Starlette(
            routes=[
                Route("/health", _health),
                Route("/sessions", self._checked(self._take), methods=["POST"]),
                Route("/sessions/{session}/end", self._checked(self._end), methods=["POST"]),
                Route("/sessions/{session}/v1/models", self._checked(self._models)),
                Route("/sessions/{session}/v1/chat/completions", self._checked(chat), methods=["POST"]),
                Route("/sessions/{session}/v1/completions", self._checked(complete), methods=["POST"]),
            ],
            exception_handlers={404: _not_found, 405: _not_found, Exception: _broken},
        )

    def _checked(self, handler: Handler) -> Handler:
        """Return a handler that answers refused requests as OpenAI's API does."""

        async def handle(request: Request) -> Response:
            try:
                refused = self._refuse(request)
                return await handler(request) if refused is None else refused
            except NoSession as error:
                return _error(404, str(error), error.code, None)
            except RefusedCall as error:
                return _error(404 if error.code == "model_not_found" else 400, str(error), error.code, error.param)
            except NoChatTemplate as error:
                return _error(400, str(error), "no_chat_template", "messages")
            except RunEnded:
                return _error(410, "the run has ended: there are no more sessions", "run_ended", None)
            except ClientDisconnect:
                return Response(status_code=499)
            except RecursionError:
                return _error(400, "the body nests too deep", "invalid_json", None)

        return handle

    def _refuse(self, request: Request) -> Response | None:
        """Return the answer to a request that does not come from an agent of this run; None if it does.

        A page in a browser on this machine can send requests here. It names itself as their origin, or has a name of
        its own that leads here.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._is_local and _name_of(host) not in LOCAL_HOSTS:
            return _error(403, f"this is not {host}, and agents are on this machine only", "wrong_host", None)
        if origin is not None and origin.partition("://")[2] != host:
            return _error(403, "agents are programs, and no pages of other hosts", "wrong_origin", None)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self.key.encode()):
            return _error(401, f"the key is not that of {KEY_VARIABLE}", "invalid_api_key", None)
        return None

    async def _take(self, request: Request) -> Response:
        """Give the agent a session, or tell it to ask again."""
        taken = self._pool.take()
        session = await _unless_disconnected(request, taken, TAKE_SECONDS)
        if session is None and taken.cancel():
            return Response(status_code=204)
        session = taken.result()
        await asyncio.sleep(CLOSED_SECONDS)
        if await request.is_disconnected():
            self._pool.give_back(session.id)
            return Response(status_code=499)
        base = f"{request.url.scheme}://{request.url.netloc}"  # as the client knows it: perhaps a proxy's
        return _Json(
            {
                "id": session.id,
                "base_url": f"{base}/sessions/{session.id}/v1",
                "model": self._model,
                "prompt": session.example.prompt,
                "answer": session.example.answer,
                "row": session.example.row,
                "step": session.version,
                "greedy": session.seed is None,
            }
        )

    async def _end(self, request: Request) -> Response:
        body = await _json(request)
        reward = body.get("reward")
        is_number = type(reward) in (int, float)  # and no bool
        if reward is not None and not (is_number and abs(reward) <= LARGEST_REWARD):
            expected = f"expected a finite number of at most {LARGEST_REWARD:g} in magnitude"
            raise RefusedCall(f"reward={str(reward)[:60]!r}: {expected}", "invalid_value", "reward")
        unknown = body.keys() - {"reward"}
        if unknown:
            raise RefusedCall(f"unknown parameter: {min(unknown)}", "unknown_parameter", min(unknown))
        self._pool.end(request.path_params["session"], None if reward is None else float(reward))
        return _Json({"ended": True})

    async def _models(self, request: Request) -> Response:
        self._pool.find(request.path_params["session"])
        return _Json(
            {"object": "list", "data": [{"id": self._model, "object": "model", "created": 0, "owned_by": "hybrid3d"}]}
        )

    async def _generate(self, request: Request, is_chat: bool) -> Response:
        session_id = request.path_params["session"]  # not the session's, which changes if it is offered again
        session = self._pool.find(session_id)
        asked = read_request(await _json(request), is_chat, session, self._model, self._size)
        result = self._pool.begin(session_id, asked.call)
        found = await _unless_disconnected(request, result)
        if found is None:
            self._pool.abandon(session_id, result)
            return Response(status_code=499)
        if asked.streams:
            return StreamingResponse(events(asked, found, self._tokenizer), media_type="text/event-stream")
        return _Json(answer(asked, found, self._tokenizer))


async def _unless_disconnected(request: Request, future: Future[T], seconds: float = math.inf) -> T | None:
    """Return the result of a future; None if the client goes before, or so many seconds pass."""
    result = asyncio.wrap_future(future)
    result.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which nobody else may look at
    while seconds > 0:
        wait = min(seconds, DISCONNECT_SECONDS)
        done, _ = await asyncio.wait([result], timeout=wait)
        if done:
            return result.result()
        seconds -= wait
        if await request.is_disconnected():
            break
    return None


async def _json(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body. RefusedCall: it has none, or is too long."""
    size = request.headers.get("content-length", "0")
    if size.isascii() and size.isdecimal() and len(size) < MAX_DIGITS and int(size) > MAX_BODY_BYTES:
        raise RefusedCall(f"the body has {size} bytes, at most {MAX_BODY_BYTES}", "body_too_long")
    parts, length = [], 0
    async for part in request.stream():
        parts.append(part)
        length += len(part)
        if length > MAX_BODY_BYTES:
            raise RefusedCall(f"the body has more than {MAX_BODY_BYTES} bytes", "body_too_long")
    try:
        found = json.loads(b"".join(parts) or b"{}")
    except (ValueError, RecursionError) as error:
        raise RefusedCall(f"the body is no JSON: {error}", "invalid_json") from None
    if not isinstance(found, dict):
        raise RefusedCall(f"the body is a JSON {type(found).__name__}: expected an object", "invalid_json")
    return found


def _name_of(host: str) -> str:
    """Return the name, or the address, of a Host header, which may have a port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


async def _health(request: Request) -> Response:
    return Response()


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(404, f"{request.method} {request.url.path}: there is no such address", "not_found", None)


async def _broken(request: Request, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}: {error}", "internal_error", None)


def _error(status: int, message: str, code: str, param: str | None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _Json({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = launch_environment.first_address(host, port)
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        return listening
    except OSError as error:
        raise CannotListen(
            f"cannot bind {host}:{port} for agents ({error.strerror}), which is rollout.agents.port plus the rank: "
            "choose another rollout.agents.port, or a rollout.agents.host of this machine"
        ) from None
