"""An agent that answers the demo's problems with a calculator, in the calls of OpenAI's client.

    hybrid3d train recipes/demo-agent.yaml       # starts it beside each vLLM engine

It asks for sessions until the run has ended. In each it lets the policy write up to the `=` of a calculation such as
`<<43-12=`, writes the result behind it, lets the policy go on, and gives the reward. The endpoint collects what the
policy has generated; nothing here knows of tokens or of training.
"""

import asyncio
import os
import re

import httpx
from openai import AsyncOpenAI, BadRequestError

ENDPOINT = os.environ["HYBRID3D_ENDPOINT"]
KEY = os.environ["HYBRID3D_API_KEY"]
SESSIONS = 64  # at a time
MAX_CALCULATIONS = 4
CALCULATION = re.compile(r"<<(\d{1,9})([-+])(\d{1,9})=$")
ANSWER = re.compile(r"#### (-?\d+)")


def calculate(text: str) -> str:
    """Return the result of the calculation that a text ends in; a hint if it ends in another one."""
    found = CALCULATION.search(text)
    if found is None:
        return "?>>"
    a, sign, b = found.groups()
    return f"{int(a) + int(b) if sign == '+' else int(a) - int(b)}>>"


async def answer(policy: AsyncOpenAI, model: str, question: str) -> str:
    """Return the policy's answer to a question, with the results of its calculations."""
    text = ""
    for _ in range(MAX_CALCULATIONS):
        try:
            reply = await policy.completions.create(
                model=model,
                prompt=question + text,
                max_tokens=16,
                stop=["="],
                extra_body={"include_stop_str_in_output": True},
            )
        except BadRequestError as error:
            if error.code == "context_length_exceeded":  # the answer is as long as it may be
                break
            raise
        text += reply.choices[0].text
        if not text.endswith("="):
            break
        text += calculate(text)
    return text


async def work(http: httpx.AsyncClient, policy: AsyncOpenAI) -> None:
    """Answer one session after another until the run has ended."""
    while (response := await http.post("/sessions")).status_code != httpx.codes.GONE:
        if response.status_code == httpx.codes.NO_CONTENT:
            continue  # there was none for a while
        session = response.raise_for_status().json()
        of_session = policy.with_options(base_url=session["base_url"])
        found = ANSWER.search(await answer(of_session, session["model"], session["prompt"]))
        expected = ANSWER.search(session["answer"])
        reward = float(found is not None and expected is not None and found[1] == expected[1])
        await http.post(f"/sessions/{session['id']}/end", json={"reward": reward})


async def main() -> None:
    """Answer many sessions at a time."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        httpx.AsyncClient(base_url=ENDPOINT, headers=headers, timeout=120) as http,
        AsyncOpenAI(base_url=ENDPOINT, api_key=KEY, timeout=600) as policy,
        asyncio.TaskGroup() as workers,
    ):
        for _ in range(SESSIONS):
            workers.create_task(work(http, policy))


if __name__ == "__main__":
    asyncio.run(main())
