"""An agent that chats at length, sends its whole history with each call, edits some, and writes down every call.

python agent_chats.py OUT TURNS
"""

import json
import os
import random
import sys
import threading
from pathlib import Path

import httpx
from openai import BadRequestError, NotFoundError, OpenAI

ENDPOINT, KEY = os.environ["HYBRID3D_ENDPOINT"], os.environ["HYBRID3D_API_KEY"]
OUT, TURNS = Path(sys.argv[1]), int(sys.argv[2])
THREADS = 48
EDITS = 0.05  # of calls, before which the history is changed


def chat(policy: OpenAI, session: dict, write) -> None:
    rng = random.Random(session["id"])
    messages = [{"role": "user", "content": session["prompt"]}]
    for _ in range(1 if session["greedy"] else TURNS):
        try:
            reply = policy.chat.completions.create(
                model=session["model"],
                messages=messages,
                max_tokens=4,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return
        except NotFoundError as error:  # the session was begun again with newer weights, or dropped
            if error.code != "no_session":
                raise
            write({"step": session["step"], "greedy": session["greedy"], "call": None})
            return
        choice = reply.choices[0]
        content = choice.logprobs.content if choice.logprobs is not None else []
        call = [reply.prompt_token_ids, choice.token_ids, [token.logprob for token in content]]
        write({"step": session["step"], "greedy": session["greedy"], "call": call})
        messages += [choice.message.model_dump(), {"role": "user", "content": rng.choice(["go", "on", " é "])}]
        if rng.random() < EDITS:
            messages = [messages[0], *messages[rng.randrange(1, len(messages)) :]]


def main() -> None:
    calls, lock = (OUT / f"{os.getpid()}.jsonl").open("w"), threading.Lock()
    headers, limits = {"authorization": f"Bearer {KEY}"}, httpx.Limits(max_connections=THREADS)
    http = httpx.Client(base_url=ENDPOINT, headers=headers, timeout=120, limits=limits)
    policy = OpenAI(base_url=ENDPOINT, api_key=KEY)

    def write(call: dict) -> None:
        with lock:
            print(json.dumps(call), file=calls, flush=True)

    def work() -> None:
        while (response := http.post("/sessions")).status_code != httpx.codes.GONE:
            if response.status_code == httpx.codes.OK:
                session = response.json()
                chat(policy.with_options(base_url=session["base_url"]), session, write)
                http.post(f"/sessions/{session['id']}/end", json={"reward": float(session["id"] > "V")})

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
