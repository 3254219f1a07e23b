"""What one row of a data file holds: the formats, and the turns each stands for.

=======================  ========================================================================
messages                 ``{"messages": [{"role": "user", "content": …}, …]}``
conversations            ``{"conversations": [{"from": "human", "value": …}, …]}`` (ShareGPT), also
                         with ``role`` and ``content``
prompt+completion turns  ``{"prompt": [turns], "completion": [turns]}``; only the completion's
                         answers are learned
prompt+completion        ``{"prompt": …, "completion": …}``
instruction+output       ``{"instruction": …, "input": … (optional), "output": …}`` (Alpaca)
instruction+response     ``{"instruction": …, "input": … (optional), "response": …}``
text                     ``{"text": …}``, learned whole
=======================  ========================================================================

All but ``messages``, turns and ``text`` take an optional ``system``. Where a row fits several, the
first counts: Alpaca's own files hold ``text`` beside ``instruction`` and ``output``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from entrenar.errors import DataError
from entrenar.finetune.config import nearest

__all__ = ["FORMATS", "Conversation", "format_of", "kind_of", "read_row", "unused_keys"]

FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt+completion turns": ("prompt", "completion"),
    "prompt+completion": ("prompt", "completion"),
    "instruction+output": ("instruction", "output"),
    "instruction+response": ("instruction", "response"),
    "text": ("text",),
}
_OPTIONAL = {
    "messages": (),
    "conversations": ("system",),
    "prompt+completion turns": (),
    "prompt+completion": ("system",),
    "instruction+output": ("input", "system"),
    "instruction+response": ("input", "system"),
    "text": (),
}
_ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
# The names that ShareGPT's and its followers' files give to the speakers.
_SPEAKERS = {
    **_ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_JSON_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false"}

Turn = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One sample: turns that end with the assistant's, or one plain text.

    Attributes:
        messages: ``{"role": …, "content": …}`` each, in order; a plain text has the role ``text``.
        line: Line of the file it starts on, from 1.
        learned_from: Number of the first turn that may be learned; those before are the prompt.
    """

    messages: tuple[Turn, ...]
    line: int
    learned_from: int = 0


def format_of(row: dict[str, Any], where: str, expected: str | None) -> str:
    """Return a row's format: the one expected where it fits, else the first that does.

    Raises:
        DataError: It fits none.
    """
    fitting = [name for name in FORMATS if _fits(row, name)]
    if expected in fitting:
        return str(expected)
    if fitting:
        return fitting[0]
    missing = [k for k in FORMATS[expected] if k not in row] if expected else []
    found = ", ".join(repr(key) for key in row) or "none"
    if missing:
        raise DataError(
            f"{where}: the key {missing[0]!r} is missing; found the keys {found}",
            f"add it, as in the other rows ({expected})",
        )
    known = sorted({key for keys in FORMATS.values() for key in keys})
    hints = [nearest(key, known) for key in row]
    hint = next((h for h in hints if h.startswith("did you")), "rename the keys of the row")
    wanted = " or ".join(dict.fromkeys("+".join(keys) for keys in FORMATS.values()))
    raise DataError(f"{where}: found the keys {found}, wanted {wanted}", hint)


def _fits(row: dict[str, Any], name: str) -> bool:
    keys = FORMATS[name]
    return all(key in row for key in keys) and (
        not name.endswith(" turns") or all(_are_turns(row[key]) for key in keys)
    )


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(v, dict) and "role" in v for v in value)


def unused_keys(row: dict[str, Any], kind: str) -> Iterator[str]:
    """Yield the keys of a row, and of its turns, that its format does not know."""
    known = FORMATS[kind] + _OPTIONAL[kind]
    yield from (key for key in row if key not in known)
    for key in FORMATS[kind]:
        turns = row[key] if isinstance(row[key], list) else []
        for turn in turns:
            if isinstance(turn, dict) and "type" not in turn:
                names = ("from", "value") if "from" in turn else ("role", "content")
                yield from (f"{key}[].{name}" for name in turn if name not in names)


def read_row(row: dict[str, Any], kind: str, line: int, where: str) -> Conversation | None:
    """Return a row's sample; None where there is nothing in it to learn.

    Args:
        row: An object for which :func:`format_of` returned ``kind``.
        kind: A key of ``FORMATS``.
        line: The line it starts on.
        where: ``file:line``, for messages.

    Raises:
        DataError: A value cannot be used.
    """
    if kind == "text":
        text = _text(row["text"], "text", where)
        return Conversation(({"role": "text", "content": text},), line) if text.strip() else None
    prompt: list[Turn] = []
    if kind == "prompt+completion turns":
        prompt = _turns(row["prompt"], "prompt", where)
        turns = prompt + _turns(row["completion"], "completion", where)
    elif kind in ("messages", "conversations"):
        turns = _with_system(_turns(row[kind], kind, where), row, kind, where)
    else:
        turns = _with_system(_pair(row, kind, where), row, kind, where)
    while len(turns) > len(prompt) and turns[-1]["role"] != "assistant":
        turns.pop()  # what follows the last answer has nothing to teach
    if len(turns) == len(prompt):
        part = " of the completion" if prompt else ""
        raise DataError(
            f"{where}: no turn{part} has the role 'assistant'", "each sample needs an answer"
        )
    if not turns[-1]["content"].strip():
        return None
    return Conversation(tuple(turns), line, len(prompt))


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    if value is None:
        return "null"
    if type(value) in _JSON_NAMES:
        return _JSON_NAMES[type(value)]
    digits = str(value)
    return f"the number {digits}" if len(digits) <= 24 else f"a number of {len(digits)} digits"


def _text(value: Any, key: str, where: str) -> str:
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {kind_of(value)}, wanted text", "correct that row")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(
            f"{where}: {key!r} holds half of a surrogate pair (\\ud800 to \\udfff)",
            "write the whole character",
        )
    return value


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _pair(row: dict[str, Any], kind: str, where: str) -> list[Turn]:
    prompt_key, response_key = FORMATS[kind]
    prompt = _text(row[prompt_key], prompt_key, where)
    response = _text(row[response_key], response_key, where)
    if not prompt.strip():
        raise DataError(f"{where}: {prompt_key!r} is empty, wanted text", "correct that row")
    if "input" in _OPTIONAL[kind] and row.get("input") is not None:
        context = _text(row["input"], "input", where)
        prompt = f"{prompt}\n\n{context}" if context.strip() else prompt
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _with_system(turns: list[Turn], row: dict[str, Any], kind: str, where: str) -> list[Turn]:
    if "system" not in _OPTIONAL[kind] or row.get("system") is None:
        return turns
    system = _text(row["system"], "system", where)
    if not system.strip():
        return turns
    if turns[0]["role"] == "system":
        raise DataError(f"{where} has a 'system' and a first turn of that role", "remove one")
    return [{"role": "system", "content": system}, *turns]


def _turns(turns: Any, key: str, where: str) -> list[Turn]:
    if not isinstance(turns, list) or not turns:
        what = "empty" if turns == [] else kind_of(turns)
        raise DataError(f"{where}: {key!r} is {what}, wanted a list of turns", "correct that row")
    return [_turn(turn, f"{key}[{i}]", where) for i, turn in enumerate(turns)]


def _turn(turn: Any, name: str, where: str) -> Turn:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {name} is {kind_of(turn)}, wanted an object", "correct that row")
    shared = name.startswith("conversations") and "from" in turn
    role_key, text_key = ("from", "value") if shared else ("role", "content")
    known = _SPEAKERS if name.startswith("conversations") else _ROLES
    for key in (role_key, text_key):
        if key not in turn:
            hint = "rename 'from' and 'value'" if "from" in turn and not shared else "add it"
            raise DataError(f"{where}: {name} has no key {key!r}", hint)
    if turn.get("tool_calls"):
        raise DataError(f"{where}: {name} calls tools, which cannot be learned", "remove that row")
    role = turn[role_key]
    if not isinstance(role, str) or role not in known:
        shown = repr(role) if isinstance(role, str) else kind_of(role)
        raise DataError(
            f"{where}: {name}.{role_key} is {shown}, wanted {', '.join(known)}", "correct that row"
        )
    return {"role": known[role], "content": _text(turn[text_key], f"{name}.{text_key}", where)}
