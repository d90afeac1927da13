"""The history of an agent's session: which tokens of it a call goes on with, though the agent sends text.

Generated tokens are never tokenized again. A call that repeats the history of an earlier one continues its tokens, and
only what was added is tokenized. A call with another history begins a new branch, whose whole prompt is tokenized.

`RefusedCall` says why a call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid3d.config import Rollout
from hybrid3d.generation.samples import AnswerTokens
from hybrid3d.rl.chats import InvalidRow, render
from hybrid3d.rl.data import encode_prompt
from hybrid3d.rl.token_texts import decode_part, encode_part

Message = Mapping[str, Any]
Messages = tuple[Message, ...]


class NoChatTemplate(ValueError):
    """The tokenizer has no chat template, or it does not accept the messages."""


@dataclass(frozen=True)
class PromptTokens:
    """A prompt that is given as token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptText:
    """A prompt that is given as text; of a chat, the template has made it of `messages`."""

    text: str
    messages: Messages | None = None


CallPrompt = PromptTokens | PromptText


@dataclass(frozen=True)
class Turn:
    """A call of the session that has been answered.

    Attributes:
        end: the number of its branch's tokens after it.
        text: of its prompt and its reply, with special tokens.
        messages: of a chat, with the reply as the agent received it; None if it is no chat.
        cut: whether the reply is shorter than the generated text, as it was cut at a stop.
    """

    end: int
    text: str
    messages: Messages | None
    reply: str
    cut: bool


@dataclass(eq=False, kw_only=True)
class Branch(AnswerTokens):
    """One sequence of tokens that calls have generated, each after the ones before it.

    Attributes:
        prompt_ids: the tokens before the first that was generated in this branch.
        turns: its calls that were answered.
        busy: whether a call is generating.
    """

    prompt_ids: tuple[int, ...]
    turns: list[Turn] = field(default_factory=list)
    busy: bool = True

    @property
    def context(self) -> tuple[int, ...]:
        """The token ids of the prompt and of all turns."""
        return (*self.prompt_ids, *self.tokens)

    def context_of(self, turn: Turn) -> tuple[int, ...]:
        """Return the token ids up to the end of a turn."""
        return (*self.prompt_ids, *self.tokens[: turn.end])


@dataclass(frozen=True)
class Extension:
    """What a call goes on with.

    Attributes:
        branch, turn: those that its prompt begins with; None if it begins a branch.
        added: the tokens that follow them.
        changes: of the history when this was found.
    """

    branch: Branch | None
    turn: Turn | None
    added: tuple[int, ...]
    changes: int


class History:
    """The branches of a session.

    Attributes:
        last: the branch of the call that was answered last; None if none was.
        changes: how often it has changed.
    """

    def __init__(self, tokenizer: Any, writer: Any):
        """Replies are decoded in another thread than prompts: by `writer`, another tokenizer like `tokenizer`."""
        self._tokenizer, self._writer = tokenizer, writer
        self.branches: list[Branch] = []
        self.last: Branch | None = None
        self.changes = 0

    def plan(self, prompt: CallPrompt) -> Extension:
        """Find out what a call goes on with, which takes long for long texts; other threads may change the history."""
        changes = self.changes
        for branch, turn in self._longest_first():
            added = self._added(branch, turn, prompt)
            if added is not None:
                return Extension(branch, turn, tuple(added), changes)
        ids = prompt.ids if isinstance(prompt, PromptTokens) else self._encode(prompt)
        return Extension(None, None, tuple(ids), changes)

    def begin(self, prompt: CallPrompt, plan: Extension) -> Branch:
        """Begin a call: return the branch to which it generates, whose context is the call's prompt.

        What `plan` has returned is made anew if the history has changed since.
        """
        if plan.changes != self.changes:
            plan = self.plan(prompt)
        self.changes += 1
        branch, turn = plan.branch, plan.turn
        if branch is None or turn is None:
            return self._add(Branch(prompt_ids=plan.added))
        if branch.busy or turn is not branch.turns[-1]:
            return self._add(Branch(prompt_ids=(*branch.context_of(turn), *plan.added)))
        branch.append_written(plan.added)
        branch.busy = True
        return branch

    def finish(self, branch: Branch, prompt: CallPrompt, reply: str, cut: bool) -> None:
        """End a call, whose tokens are in the branch; arguments are as in `Turn`."""
        text = prompt.text if isinstance(prompt, PromptText) else None
        first = branch.turns[-1].end if branch.turns else 0
        start = branch.loss_mask.index(True, first)  # after what the agent has added
        before = branch.context[: len(branch.prompt_ids) + start]
        generated = decode_part(self._writer, branch.tokens[start:], before, skip_special_tokens=False)
        if text is None:
            text = decode_part(self._writer, before, (), skip_special_tokens=False)
        text += reply if reply.lstrip() == generated.lstrip() else generated  # the agent has the text of its reply
        messages = prompt.messages if isinstance(prompt, PromptText) else None
        if messages is not None:
            messages = (*messages, {"role": "assistant", "content": reply})
        branch.turns.append(Turn(len(branch.tokens), text, messages, reply, cut))
        branch.busy = False
        self.last = branch
        self.changes += 1

    def drop(self, branch: Branch) -> int:
        """End a call that nobody waits for any more; return how many generated tokens were dropped."""
        end = branch.turns[-1].end if branch.turns else 0
        dropped = sum(branch.loss_mask[end:])
        branch.truncate(end)
        branch.experts = branch.experts.first(len(branch.context))
        branch.busy = False
        self.changes += 1
        if not branch.turns:
            self.branches.remove(branch)
        return dropped

    def render(self, messages: Messages, ends: bool = False) -> str:
        """Return the text that the chat template makes of messages.

        Unless they end here, the beginning of the policy's reply follows.

        Raises:
            NoChatTemplate: there is no template, or it does not accept the messages.
        """
        if not self._tokenizer.chat_template:
            raise NoChatTemplate("the checkpoint's tokenizer has no chat template: use /v1/completions")
        try:
            return render(self._tokenizer, messages, reply_follows=not ends)
        except InvalidRow as error:
            raise NoChatTemplate(f"the chat template does not accept the messages: {error.__cause__}") from None

    def _add(self, branch: Branch) -> Branch:
        self.branches.append(branch)
        return branch

    def _longest_first(self) -> list[tuple[Branch, Turn]]:
        """Return all turns, those with the longest contexts first; of equal ones first those that can be continued."""

        def key(item: tuple[Branch, Turn]) -> tuple[int, bool]:
            branch, turn = item
            return -len(branch.prompt_ids) - turn.end, branch.busy or turn is not branch.turns[-1]

        return sorted(((branch, turn) for branch in self.branches for turn in branch.turns), key=key)

    def _added(self, branch: Branch, turn: Turn, prompt: CallPrompt) -> Sequence[int] | None:
        """Return the tokens that a prompt adds to the context of a turn; None if it does not begin with this."""
        if isinstance(prompt, PromptTokens):
            context = branch.context_of(turn)
            return prompt.ids[len(context) :] if prompt.ids[: len(context)] == context else None
        text: str | None = None
        if prompt.text.startswith(turn.text):
            text = prompt.text[len(turn.text) :]
        elif prompt.messages is not None and turn.messages is not None and not turn.cut:
            text = self._added_messages(branch, turn, turn.messages, prompt)
        return None if text is None else encode_part(self._tokenizer, text, branch.context_of(turn))

    def _added_messages(self, branch: Branch, turn: Turn, history: Messages, prompt: PromptText) -> str | None:
        """Return the text after a turn's tokens in a chat that begins with the turn's messages.

        A template may strip white space off a reply, and a reply lacks special tokens, so that its text differs from
        that of its tokens. None if the messages are others, or the template changes the history in another way.
        """
        assert prompt.messages is not None, "only chats have messages"
        if [*map(_essence, history)] != [*map(_essence, prompt.messages[: len(history)])]:
            return None
        try:
            before, after = self.render(history[:-1]), self.render(history, ends=True)
        except NoChatTemplate:  # it renders no messages that end with a reply
            return None
        if not after.startswith(before) or not prompt.text.startswith(after):
            return None
        rendered = after[len(before) :].lstrip()  # a template may write white space before a reply, or strip its own
        reply = next((text for text in (turn.reply.lstrip(), turn.reply.strip()) if rendered.startswith(text)), None)
        if reply is None:
            return None
        closing = rendered[len(reply) :]
        last = self._tokenizer.convert_ids_to_tokens(branch.tokens[turn.end - 1])
        if branch.tokens[turn.end - 1] in self._tokenizer.all_special_ids:
            if not closing.startswith(last):
                return None  # the template does not write the end token that was generated
            closing = closing[len(last) :]
        return closing + prompt.text[len(after) :]

    def _encode(self, prompt: PromptText) -> list[int]:
        """Tokenize a whole prompt; the text of a chat has its special tokens already."""
        if prompt.messages is None:
            return encode_prompt(self._tokenizer, prompt.text)
        return list(self._tokenizer.encode(prompt.text, add_special_tokens=False))


def _essence(message: Message) -> dict[str, Any]:
    """Return what of a message a template can see, without the keys that clients add as null."""
    found = {key: value for key, value in message.items() if value is not None}
    if not found.get("content"):
        found.pop("content", None)
    return found


class RefusedCall(ValueError):
    """A call that cannot be made; `code` is OpenAI's for it."""

    def __init__(self, message: str, code: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


class NoSession(RefusedCall):
    """There is no session of this id, or it has ended."""

    def __init__(self) -> None:
        super().__init__("there is no such session: it has ended, or its agent was silent too long", "no_session")


class RunEnded(RuntimeError):
    """The run has ended: there are no more sessions."""


@dataclass(frozen=True)
class Call:
    """What an agent asks for.

    Attributes:
        max_tokens: of the reply at most; None: as many as there is room for.
        include_stop: whether the reply has the stop that ended it.
    """

    prompt: CallPrompt
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    include_stop: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether its prompt is messages."""
        return isinstance(self.prompt, PromptText) and self.prompt.messages is not None

    def check_length(self, rollout: Rollout, longest: int) -> None:
        """Check that the prompt may fit: by its tokens, or by the characters of so many tokens of `longest` characters.

        Raises:
            RefusedCall: it cannot.
        """
        prompt, most = self.prompt, rollout.max_model_len
        given = prompt.ids if isinstance(prompt, PromptTokens) else prompt.text
        unit, limit = ("tokens", most) if isinstance(prompt, PromptTokens) else ("characters", most * longest)
        if len(given) > limit:
            problem = f"the prompt has {len(given)} {unit}, and rollout.max_model_len={most} leaves room for {limit}"
            raise self._refused(problem, "context_length_exceeded")

    def without_room(self, context: int, answer: int, rollout: Rollout) -> RefusedCall:
        """Return why a prompt of so many tokens leaves no room for a reply; `answer` of them follow its branch's."""
        if not context:
            return self._refused("the prompt has no tokens", "invalid_prompt")
        problem = f"the prompt has {context} tokens, and rollout.max_model_len={rollout.max_model_len} leaves no room"
        if context < rollout.max_model_len:
            limit = f"rollout.max_new_tokens={rollout.max_new_tokens}"
            problem = f"{answer} tokens follow the prompt of the branch, and {limit} leaves no room"
        return self._refused(f"{problem} for a reply: end the session", "context_length_exceeded")

    def _refused(self, problem: str, code: str) -> RefusedCall:
        return RefusedCall(problem, code, "messages" if self.is_chat else "prompt")


@dataclass(frozen=True)
class CallResult:
    """The answer to a call.

    Attributes:
        tokens: that were generated after the prompt, the one that ended it included.
        logprobs: of these; empty where the session is greedy.
        finish_reason: `stop` or `length`.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
