"""Compares the tokenizer that transformers makes with its files, and tests its chat template, which is user code.

Where files are missing, transformers guesses: the class from the model's type, and from the class special tokens and
how texts are split. A guess that contradicts a file is refused; what no file says is reported.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.inputs.files import read_object
from hybrid3d.reshard.file_index import CheckpointError
from hybrid3d.rl.chats import without_nulls
from hybrid3d.rl.data_files import DataError, read_columns

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Texts of which every reading of a tokenizer's files makes the same tokens, and others
PLAIN_TEXTS = ("a b", "It is 7 + 35, is it not?", "Paul has 73 eggs and finds 13 more. How many now?")
OTHER_TEXTS = (" b", "a  b", "a\n\n b\t", "naïve 你好", "def f(x):\n    return x")

ROWS = 4  # of each file, with which the template is tested
SECONDS = 10.0  # that rendering them may take
MEMORY = 2**30  # bytes that the process may allocate
CHARACTERS = 2**24  # that a template may return for one prompt


def check_tokenizer_files(folder: Path, tokenizer: Any) -> None:
    """Check that the tokenizer that transformers made of a folder does what the folder's files say.

    Raises:
        CheckpointError: it begins or ends texts with a token that is in none of them, ends answers with another token
            than the model's config, numbers tokens otherwise or splits plain texts otherwise; with both values.
    """
    declared, vocabulary = _declared_tokens(folder), _vocabulary(folder)
    for name in ("bos_token", "eos_token"):
        token = getattr(tokenizer, name, None)
        if vocabulary is not None and token is not None and name not in declared and token not in vocabulary:
            raise CheckpointError(
                f"{folder}: transformers takes {token!r} for the {name}, which is in none of the tokenizer's files: it "
                f"guesses, because none of them names one: add it to tokenizer_config.json"
            )
    ends, end = read_end_tokens(folder), getattr(tokenizer, "eos_token_id", None)
    if "eos_token" not in declared and end is not None and ends and end not in ends:
        raise CheckpointError(
            f"{folder}: transformers takes {tokenizer.eos_token!r} ({end}) for the eos_token, because no file of the "
            f"tokenizer names one, and the model's config has eos_token_id {ends}: name it in tokenizer_config.json"
        )
    numbers = tokenizer.get_vocab()
    for token, number in (vocabulary or {}).items():
        if numbers.get(token, number) != number:
            problem = f"token {token!r} is {number} in the tokenizer's files, and transformers reads {numbers[token]}"
            raise CheckpointError(f"{folder}: {problem}: put the files of one tokenizer there")
    for file, text, found, expected in _differing_texts(folder, tokenizer, PLAIN_TEXTS):
        raise CheckpointError(
            f"{folder}: transformers makes {_pieces(tokenizer, found)} of {text!r}, and {file} itself "
            f"{_pieces(tokenizer, expected)}: {_advice(folder, file)}"
        )


def tokenizer_assumptions(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Yield a sentence for each thing that transformers assumes because no file of the tokenizer says it."""
    declared = _declared_tokens(folder)
    guessed = {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS if name not in declared}
    if guessed.get("pad_token") == getattr(tokenizer, "eos_token", None):  # as `read_tokenizer` sets it
        guessed["pad_token"] = None
    named = ", ".join(f"{name} {token!r}" for name, token in guessed.items() if token is not None)
    if named:
        yield f"no file of the tokenizer names {named}: assumed from its class, {type(tokenizer).__name__}"
    if read_object(folder / "tokenizer_config.json").get("tokenizer_class") is None:
        yield f"no file names the tokenizer's class: {type(tokenizer).__name__} is assumed"
    ends, end = read_end_tokens(folder), getattr(tokenizer, "eos_token_id", None)
    if ends and end not in ends:
        yield f"the tokenizer's eos_token is {end}, and the model's config has eos_token_id {ends}: both end answers"
    elif not ends:
        yield f"no config names an eos_token_id: answers end with the tokenizer's, {end}"
    inline, file = read_object(folder / "tokenizer_config.json").get("chat_template"), folder / "chat_template.jinja"
    if isinstance(inline, str) and file.is_file() and file.read_text(encoding="utf-8") != inline:
        yield "chat_template.jinja is used, and tokenizer_config.json has another chat template"
    for name, text, found, expected in _differing_texts(folder, tokenizer, OTHER_TEXTS):
        made = f"{_pieces(tokenizer, found)}, {name} itself {_pieces(tokenizer, expected)}"
        yield f"of {text!r} transformers makes {made}: both engines use the former"
        return


def _declared_tokens(folder: Path) -> dict[str, Any]:
    return {
        name: value
        for file in ("special_tokens_map.json", "tokenizer_config.json")
        for name, value in read_object(folder / file).items()
        if name in SPECIAL_TOKENS and value is not None
    }


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the tokens that a folder's files number; None if they cannot be read here."""
    own = read_object(folder / "tokenizer.json")
    added = {name: number for name, number in read_object(folder / "added_tokens.json").items() if type(number) is int}
    decoder = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and str(number).isdigit():
            added[entry["content"]] = int(number)
    model = own.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of Unigram: pairs of a token and its score
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    if isinstance(vocabulary, dict):
        entries = own.get("added_tokens") or []
        return {**vocabulary, **{entry["content"]: entry["id"] for entry in entries}, **added}
    if (folder / "vocab.json").is_file():
        return {**read_object(folder / "vocab.json"), **added}
    pieces = _sentencepiece(folder)
    if pieces is not None:
        return {pieces.id_to_piece(number): number for number in range(pieces.get_piece_size())} | added
    return None


def read_end_tokens(folder: Path) -> list[int]:
    """Return the end tokens of the generation config, or else of the model's config."""
    for name in ("generation_config.json", "config.json"):
        ends = read_object(folder / name).get("eos_token_id")
        if ends is not None:
            return list(ends) if isinstance(ends, list) else [ends]
    return []


def _differing_texts(
    folder: Path, tokenizer: Any, texts: tuple[str, ...]
) -> Iterator[tuple[str, str, list[int], list[int]]]:
    """Yield the file, the text, transformers' tokens and the file's own where these differ."""
    file, encode = _own_encode(folder)
    if encode is None:
        return
    for text in texts:
        found, expected = tokenizer.encode(text, add_special_tokens=False), encode(text)
        if found != expected:
            yield file, text, found, expected


def _own_encode(folder: Path) -> tuple[str, Callable[[str], list[int]] | None]:
    """Return the file that says how texts are split, and its own way of doing so; None if it cannot be read here."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
        own.no_padding()
        own.no_truncation()
        return "tokenizer.json", lambda text: list(own.encode(text, add_special_tokens=False).ids)
    pieces = None if (folder / "vocab.json").is_file() else _sentencepiece(folder)
    return "tokenizer.model", None if pieces is None else lambda text: list(pieces.encode(text))


def _advice(folder: Path, file: str) -> str:
    """Return what makes transformers split texts as a file of the tokenizer says."""
    if file != "tokenizer.json":
        return "name the tokenizer_class in tokenizer_config.json, or add the tokenizer.json that belongs to the model"
    present = read_object(folder / "tokenizer_config.json").get("tokenizer_class")
    is_there = "names no tokenizer_class" if present is None else f"has {present!r}"
    return f'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, which {is_there}'


def _sentencepiece(folder: Path) -> Any:
    """Return the SentencePiece model in a folder; None if there is none, or it is of another kind."""
    path = folder / "tokenizer.model"
    if not path.is_file() or importlib.util.find_spec("sentencepiece") is None:
        return None
    from sentencepiece import SentencePieceProcessor

    with suppress(RuntimeError, OSError):
        return SentencePieceProcessor(model_file=str(path))
    return None


def _pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    return [str(piece) for piece in tokenizer.convert_ids_to_tokens(tokens)[:12]]


def check_chat_template(recipe: Recipe, tokenizer: Any) -> None:
    """Render the first prompts of the data, to find a template that loops or allocates without end.

    An error that the template raises is not reported here: `PromptData.read` counts the row as broken.

    Raises:
        DataError: the tokenizer has no template, or the template takes too long or too much memory, or returns no text.
    """
    data = recipe.data
    if not tokenizer.chat_template:
        raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
    files = (data.train, data.eval, *recipe.evaluation.data.values())
    prompts = [row for path in files for row in read_columns(path, (data.prompt,), (data.prompt,), first=ROWS)[0]]
    context = multiprocessing.get_context("fork")  # inherits the loaded tokenizer; rendering starts no threads
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(sender, tokenizer, prompts), daemon=True)
    process.start()
    sender.close()
    problem = f"it does not end within {SECONDS:g} s"
    try:
        if receiver.poll(SECONDS):
            problem = receiver.recv()
    except EOFError:
        process.join(SECONDS)
        problem = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if problem:
        where = f"{Path(recipe.model.path)}: the tokenizer's chat template"
        raise DataError(f"{where} cannot be used: {problem}: repair it, or set data.chat_template to false")


def _render(connection: Connection, tokenizer: Any, prompts: list[Any]) -> None:
    """Render the prompts under a memory limit, and send the first problem, or an empty text."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    with suppress(ValueError, OSError):  # a lower limit is already set
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        problem = next(filter(None, (_problem_of(tokenizer, prompt) for prompt in prompts)), "")
    except MemoryError:
        problem = f"it takes more than {MEMORY // 2**20} MiB of memory"
    connection.send(problem)


def _problem_of(tokenizer: Any, prompt: Any) -> str:
    if prompt is None:
        return ""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = tokenizer.apply_chat_template(without_nulls(turns), add_generation_prompt=True, tokenize=False)
    except MemoryError:
        raise
    except Exception:
        return ""  # `PromptData.read` reports the row
    if not isinstance(text, str):
        return f"it returns {type(text).__name__}, not a text"
    return f"it returns {len(text):,} characters for one prompt" if len(text) > CHARACTERS else ""
