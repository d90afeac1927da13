"""An agent that asks for what is refused, cuts connections and is silent, and writes down what it is answered.

python agent_requests.py OUT.json
"""

import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from openai import OpenAI

ENDPOINT, KEY = os.environ["HYBRID3D_ENDPOINT"], os.environ["HYBRID3D_API_KEY"]
CLIENTS = 200
http = httpx.Client(
    base_url=ENDPOINT,
    headers={"authorization": f"Bearer {KEY}"},
    timeout=120,
    limits=httpx.Limits(max_connections=None),
)


def take() -> dict | None:
    """Return the next session; None when the run has ended."""
    while (response := http.post("/sessions")).status_code != httpx.codes.GONE:
        if response.status_code == httpx.codes.OK:
            return response.json()
    return None


def end(session: dict, **body: object) -> httpx.Response:
    return http.post(f"/sessions/{session['id']}/end", json=body)


def refusals(session: dict) -> dict[str, list]:
    """Return what each request is answered that cannot be: the status, OpenAI's code, the parameter and the message."""
    path, model = f"/sessions/{session['id']}/v1/completions", session["model"]
    bodies = {
        "model": {"model": "gpt-9", "prompt": "x"},
        "long": {"model": model, "prompt": [5] * 300},
        "top_p": {"model": model, "prompt": "x", "top_p": 0.5},
        "n": {"model": model, "prompt": "x", "n": 2},
        "tokens": {"model": model, "prompt": [5, 10**6]},
        "max_tokens": {"model": model, "prompt": "x", "max_tokens": 0},
        "stop": {"model": model, "prompt": "x", "stop": ["so<eos>"]},
        "half": {"model": model, "prompt": "\ud800"},
        "options": {"model": model, "prompt": "x", "stream_options": "x"},
        "logprobs": {"model": model, "prompt": "x", "logprobs": 5},
        "unknown": {"model": model, "prompt": "x", "maximum": 3},
    }
    answers = {name: http.post(path, content=json.dumps(body)) for name, body in bodies.items()}
    answers["json"] = http.post(path, content=b'{"model": ')
    answers["list"] = http.post(path, json=[1])
    chat = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    answers["template"] = http.post(path.replace("completions", "chat/completions"), json=chat)
    answers["session"] = http.post("/sessions/nobody/v1/completions", json=bodies["n"])
    answers["address"] = http.get("/v1/nothing")
    answers["key"] = httpx.post(f"{ENDPOINT}/sessions", headers={"authorization": "Bearer guess"})
    answers["reward"] = end(session, reward="much")
    return {
        name: [answer.status_code, *(answer.json()["error"][key] for key in ("code", "param", "message"))]
        for name, answer in answers.items()
    }


def cut_connection(session: dict) -> None:
    """Ask for many tokens, and go."""
    address = urlsplit(ENDPOINT)
    body = json.dumps({"model": session["model"], "prompt": "Never read.", "max_tokens": 120})
    head = (
        f"POST /sessions/{session['id']}/v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.05)


def crowd(session: dict) -> list[bool]:
    """Let many clients ask at once, each with a prompt of its own; return whether each got the answer to its own."""
    path = f"/sessions/{session['id']}/v1/completions"

    def ask(number: int) -> bool:
        prompt = [10 + number % 7, 20, 30 + number // 7]
        body = {"model": session["model"], "prompt": prompt, "max_tokens": 2, "return_token_ids": True}
        answer = http.post(path, json=body).raise_for_status().json()["choices"][0]
        return answer["prompt_token_ids"] == prompt and 1 <= len(answer["token_ids"]) <= 2

    with ThreadPoolExecutor(CLIENTS) as clients:
        return [*clients.map(ask, range(CLIENTS))]


def stream(session: dict) -> dict[str, object]:
    policy = OpenAI(base_url=session["base_url"], api_key=KEY)
    parts = [
        *policy.completions.create(
            model=session["model"],
            prompt="12+13=",
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    ]
    choices = [part.choices[0] for part in parts if part.choices]
    return {
        "models": [model.id for model in policy.models.list()],
        "text": "".join(choice.text for choice in choices),
        "tokens": [token for choice in choices for token in getattr(choice, "token_ids", None) or []],
        "reason": choices[-1].finish_reason,
        "usage": parts[-1].usage.completion_tokens,
    }


def main() -> None:
    found: dict[str, object] = {}
    first = take()
    found["session"] = first
    found["refused"] = refusals(first)
    cut_connection(first)
    found["streamed"] = stream(first)
    end(first, reward=1.0).raise_for_status()
    found["ended"] = http.post(f"/sessions/{first['id']}/v1/completions", json={}).status_code
    found["crowd"] = crowd(second := take())
    end(second, reward=0.5).raise_for_status()
    silent = take()
    ask = {"model": silent["model"], "prompt": "One call,", "max_tokens": 3}
    http.post(f"/sessions/{silent['id']}/v1/completions", json=ask).raise_for_status()
    Path(sys.argv[1]).write_text(json.dumps(found))
    idle = take()  # and never heard of again: the session is offered again to another agent
    while (session := take()) is not None:
        if session["id"] != idle["id"]:
            ask = {"model": session["model"], "prompt": session["prompt"], "max_tokens": 3}
            http.post(f"/sessions/{session['id']}/v1/completions", json=ask).raise_for_status()
            end(session).raise_for_status()


main()
