"""A refused combination of settings is a record: of existing settings, of a kind, and of an engine in its range."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from hybrid3d.config import Recipe, refusals
from hybrid3d.config.refusals import ONLY_IF, OnlyIf, Refusal
from hybrid3d.config.schema import join_keys, key_of, section_type

ROOT = Path(__file__).resolve().parents[2]
TREES = {path.name: ast.parse(path.read_text()) for path in sorted((ROOT / "src/hybrid3d/config").glob("*.py"))}
MOST_NOT_BUILT = 13

MOST_TOGETHER = 25
FEATURES = {
    "agents": r"rollout\.agents|\{agents\}",
    "ahead": r"async\.(max_staleness|batches_in_flight)",
    "context parallel": r"train\.cp\b",
    "critic": r"\bcritic\b",
    "delta": r"sync\.delta",
    "dynamic sampling": r"dynamic_sampling",
    "environment": r"rollout\.environment",
    "expert-parallel rollout": r"rollout\.(dp|expert_parallel)\b",
    "expert tensor parallel": r"train\.etp",
    "fp8 rollout": r"rollout\.quantization",
    "fp8 training": r"train\.fp8",
    "greedy": r"greedy",
    "lora": r"\blora\b",
    "multi-token prediction": r"mtp_loss_coef",
    "offload": r"train\.offload",
    "overlong": r"overlong_buffer",
    "packed": r"train\.packed",
    "pairs": r"uses_pairs|dpo",
    "partial": r"async\.partial",
    "reward model": r"reward\.model",
    "reward ranks": r"roles\.reward",
    "router replay": r"router_replay",
    "sleep": r"rollout\.sleep|keep_weights",
    "split": r"roles\.generation",
    "teacher": r"kl\.endpoint",
    "token budget": r"max_tokens_per_micro_batch",
    "virtual stages": r"train\.vpp",
}

MAKERS = {
    "arithmetic": 0,
    "by_engine": 1,
    "definition": 0,
    "not_built": 1,
}  # and which of their arguments the message is
FROM_CONFIG_JSON = {"head_dim", "kv_lora_rank", "qk_rope_head_dim"}


def called(node: ast.AST | None) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def calls_of(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """Each call of one of these functions, after where it is."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node) in names:
                yield f"{file}:{node.lineno}", node


def settings_in(kind: type, path: str = "") -> Iterator[str]:
    """The dotted names of sections and settings."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        key = join_keys(path, key_of(name))
        yield key
        section = section_type(hint)
        if section is not None:
            yield from settings_in(section, key)


def conditions_in(kind: type) -> Iterator[OnlyIf]:
    """The conditions under which settings have an effect; those of a section that stands twice are twice there."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        yield from field.metadata.get(ONLY_IF, ())
        section = section_type(hints[field.name])
        if section is not None:
            yield from conditions_in(section)


def text_of(node: ast.expr) -> str:
    """A text, with a star for each part in braces."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def words(node: ast.expr) -> list[str]:
    """The patterns of the dotted names in a text, of which a part in braces may be anything."""
    return [re.escape(word).replace(r"\*", ".+") for word in text_of(node).split()]


def test_rules_yield_records() -> None:
    yields = [(file, node) for file, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    assert len(yields) > 90
    makers = {"Refusal", *MAKERS}
    others = [f"{file}:{node.lineno}" for file, node in yields if called(node.value) not in makers]
    assert not others, f"no record is yielded at {', '.join(others)}"


def test_engines_are_those_of_the_project_file() -> None:
    """A new range asks whether each of them can be lifted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pins = {re.sub(r"(\[.*\])?(==|(?=[<>]))", " ", line, count=1) for line in lines}
    for where, call in calls_of("by_engine"):
        engine = getattr(refusals, ast.unparse(call.args[0]))
        assert engine in pins, f"{where}: {engine} is not the range in pyproject.toml: can a version of it do it?"
    assert "engine" not in {condition.kind for condition in conditions_in(Recipe)}
    with pytest.raises(AssertionError, match="names the engine"):
        Refusal("engine", "no engine is named")


def test_ever_fewer_are_not_built() -> None:
    found = Counter(where.partition(":")[0] for where, _ in calls_of("not_built"))
    found["sections/"] += sum(condition.kind == "not_built" for condition in conditions_in(Recipe))
    assert found.total() <= MOST_NOT_BUILT, f"this number only falls: build what is refused; there are {dict(found)}"


def together() -> Iterator[tuple[str, list[str]]]:
    """Each refusal that names two features or more, in its text or in the variables of it, and these features."""
    for file, tree in TREES.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            named = {
                ast.unparse(target): ast.unparse(node.value)
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
            }
            for node in ast.walk(function):
                if called(node) in ("by_engine", "definition", "not_built"):  # type: ignore[arg-type]
                    text = ast.unparse(node)
                    text += " ".join(value for name, value in named.items() if f"{{{name}}}" in text)
                    found = [feature for feature, pattern in FEATURES.items() if re.search(pattern, text)]
                    if len(found) > 1:
                        yield f"{file}:{node.lineno}", found  # type: ignore[attr-defined]


def test_few_features_exclude_each_other() -> None:
    found = list(together())
    assert len(found) > 10
    assert len(found) <= MOST_TOGETHER, "\n".join(f"{where}: {', '.join(names)}" for where, names in found)


def test_refusal_of_what_is_not_built_has_a_reason() -> None:
    for where, call in calls_of("not_built"):
        given = call.args[0]
        assert isinstance(given, ast.Constant) or ast.unparse(given) == "why", f"{where}: the first argument is why"
    with pytest.raises(AssertionError, match="has a reason"):
        Refusal("not_built", "nobody knows why")
    assert {bool(condition.why) for condition in conditions_in(Recipe) if condition.kind == "not_built"} == {True}


def test_their_settings_exist() -> None:
    """Those for which values are suggested, and those that messages name."""
    known = {*settings_in(Recipe), *FROM_CONFIG_JSON}
    assert {"train.tp", "async.partial", "rollout.agents.port", "critic.optimizer.min_lr", "lora.sync"} <= known
    suggested = [(where, call.args[0]) for where, call in calls_of("_check_rules")]
    told: list[str] = []
    sections = "|".join({name.partition(".")[0] for name in settings_in(Recipe)})
    for where, call in calls_of(*MAKERS):
        message, *others = call.args[MAKERS[called(call)] :]
        suggested += [(where, settings) for settings in others[:1]]
        told += [f"{where}: {word}" for word in re.findall(rf"\b(?:{sections})\.[a-z_.]+\b", text_of(message))]
    assert len(suggested) > 25
    for where, given in suggested:
        if ast.unparse(given) == "key":  # of a parameter, or one of a few that stand above the call
            continue
        assert words(given), where
        for word in words(given):
            assert any(re.fullmatch(word, name) for name in known), f"{where}: no setting is called {word}"
    assert len(told) > 50
    kinds = {"train.offload_"}  # in `train.offload_{kind}`
    assert [word for word in told if word.partition(": ")[2] not in known | kinds] == []
    deciding = {key for condition in conditions_in(Recipe) for key in condition.decided_by}
    assert len(deciding) > 3
    assert deciding <= known
