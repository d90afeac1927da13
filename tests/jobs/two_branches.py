"""An agent whose answers have two branches, the second of which is scored; for every other row it gives the reward.

Its argument is the reward that it gives; without one it never gives any.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

HEADERS = {"authorization": f"Bearer {os.environ['HYBRID3D_API_KEY']}"}


def answer(http: httpx.Client, session: dict[str, object]) -> None:
    for prompt, most in ((session["prompt"], 5), (f"{session['prompt']}!", 9)):
        request = {"model": session["model"], "prompt": prompt, "max_tokens": most}
        http.post(f"{session['base_url']}/completions", json=request, timeout=300).raise_for_status()
    gives = len(sys.argv) > 1 and int(str(session["row"])) % 2 == 0
    http.post(f"/sessions/{session['id']}/end", json={"reward": float(sys.argv[1])} if gives else {})


def work(_: int) -> None:
    with httpx.Client(base_url=os.environ["HYBRID3D_ENDPOINT"], headers=HEADERS, timeout=120) as http:
        while (response := http.post("/sessions")).status_code != httpx.codes.GONE:
            if response.status_code == httpx.codes.OK:
                answer(http, response.json())


with ThreadPoolExecutor(16) as pool:
    list(pool.map(work, range(16)))
