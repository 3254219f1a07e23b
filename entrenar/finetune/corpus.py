"""Instruction data from a JSON Lines file (one object a line) or a file that is one JSON array.

One format a file, told by its keys, checked row by row before anything is trained:

=====================  ==========================================================================
messages               ``{"messages": [{"role": "user", "content": …}, {"role": "assistant", …}]}``
prompt+completion      ``{"prompt": …, "completion": …}``
instruction+output     ``{"instruction": …, "input": … (optional), "output": …}``
instruction+response   ``{"instruction": …, "input": … (optional), "response": …}``
=====================  ==========================================================================

All but the first take an optional ``system``. Other keys are passed over and listed. A row whose
response is empty teaches nothing: it is skipped and counted. Everything else that cannot be used
stops the reading with the file, the line, the key and what was found.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entrenar.errors import DataError
from entrenar.finetune.config import nearest

__all__ = ["FORMATS", "Conversation", "Corpus", "read_corpus"]

FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt+completion": ("prompt", "completion"),
    "instruction+output": ("instruction", "output"),
    "instruction+response": ("instruction", "response"),
}
_OPTIONAL = {
    "messages": (),
    "prompt+completion": ("system",),
    "instruction+output": ("input", "system"),
    "instruction+response": ("input", "system"),
}
_ROLES = ("system", "user", "assistant", "tool")
_JSON_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One sample: turns that end with the assistant's.

    Attributes:
        messages: ``{"role": …, "content": …}`` each, in order.
        line: Line of the file it starts on, from 1.
    """

    messages: tuple[dict[str, str], ...]
    line: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The samples of one file.

    Attributes:
        path: The file.
        format: A key of ``FORMATS``.
        conversations: The usable samples, in the file's order.
        empty_lines: Lines of rows that were skipped because their response is empty.
        ignored_keys: Keys that the format does not know, in order of appearance.
    """

    path: str
    format: str
    conversations: tuple[Conversation, ...]
    empty_lines: tuple[int, ...] = ()
    ignored_keys: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.conversations)

    def where(self, index: int) -> str:
        """Return ``file:line`` of a sample."""
        return f"{self.path}:{self.conversations[index].line}"


def read_corpus(path: str | Path) -> Corpus:
    """Read and check a whole data file.

    Args:
        path: A UTF-8 file, with or without a byte order mark; lines end in LF or CRLF, and blank
            ones are passed over.

    Raises:
        DataError: The file is missing, empty, not UTF-8, or has a row that cannot be used; the
            message names file, line and key.
    """
    rows = _rows(_Source(str(path)))
    found: list[Conversation] = []
    empty: list[int] = []
    ignored: dict[str, None] = {}
    first: tuple[str, int] | None = None
    for line, row in rows:
        where = f"{path}:{line}"
        kind = _format_of(row, where, first[0] if first else None)
        first = first or (kind, line)
        if kind != first[0]:
            raise DataError(
                f"{where} has the format {kind}, but line {first[1]} has {first[0]}",
                "one file holds one format; split it",
            )
        ignored.update(dict.fromkeys(k for k in row if k not in FORMATS[kind] + _OPTIONAL[kind]))
        messages = (
            _from_messages(row, where) if kind == "messages" else _from_pair(row, kind, where)
        )
        if messages is None:
            empty.append(line)
        else:
            found.append(Conversation(messages, line))
    if first is None or not found:
        detail = f": the response of all {len(empty)} rows is empty" if empty else ""
        raise DataError(f"no samples in {path}{detail}", "give a file with at least one sample")
    return Corpus(str(path), first[0], tuple(found), tuple(empty), tuple(ignored))


class _Source:
    """The bytes of a data file, with errors that name it."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"there is no data file {path}", "check the path") from error
        except IsADirectoryError as error:
            raise DataError(
                f"{path} is a folder, wanted a JSON Lines file", "name the file inside it"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", "check the file") from error
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(
                f"{path} is UTF-16, wanted UTF-8", "convert it: iconv -f UTF-16 -t UTF-8"
            )
        self.data = data.removeprefix(b"\xef\xbb\xbf")

    def decode(self, raw: bytes, line: int) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            at = line + raw.count(b"\n", 0, error.start)
            raise DataError(
                f"{self.path}:{at} is not UTF-8: byte 0x{raw[error.start]:02x} cannot start a "
                "character there",
                "save the file as UTF-8",
            ) from error


def _rows(source: _Source) -> Iterator[tuple[int, dict[str, Any]]]:
    if source.data.lstrip(b" \t\r\n").startswith(b"["):
        yield from _array_rows(source)
        return
    # Lines end at LF alone: U+2028, U+0085 and their like may stand inside a JSON string.
    for number, raw in enumerate(source.data.split(b"\n"), start=1):
        text = source.decode(raw, number).strip(" \t\r")
        if text:
            yield (
                number,
                _object(_parse(text, f"{source.path}:{number}"), f"{source.path}:{number}"),
            )


def _array_rows(source: _Source) -> Iterator[tuple[int, dict[str, Any]]]:
    text = source.decode(source.data, 1)
    at, line, counted = text.index("[") + 1, 1, 0
    wants_item = False
    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        where = f"{source.path}:{line}"
        if text[at : at + 1] == "]" and not wants_item:
            break
        value, at = _decode(text, at, where)
        yield line, _object(value, where)
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        wants_item = text[at : at + 1] == ","
        if wants_item:
            at += 1
        elif text[at : at + 1] != "]":
            at_line = 1 + text.count("\n", 0, at)
            raise DataError(
                f"{source.path}:{at_line} is not valid JSON: wanted a comma or ] after an item",
                "correct that line",
            )
    if text[at + 1 :].strip():
        raise DataError(f"{source.path}: text follows the closing ] of the array", "remove it")


def _parse(text: str, where: str) -> Any:
    value, end = _decode(text, 0, where)
    if text[end:].strip():
        raise DataError(
            f"{where} is not valid JSON at column {end + 1}: text follows the object",
            "put each object on a line of its own",
        )
    return value


def _decode(text: str, at: int, where: str) -> tuple[Any, int]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise DataError(f"{where} has the key {twice!r} twice", "remove one of them")
        return made

    def constant(name: str) -> Any:
        raise DataError(f"{where} holds {name}, which is not JSON", "write null or a number")

    decoder = json.JSONDecoder(object_pairs_hook=pairs, parse_constant=constant)
    try:
        return decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        column = error.pos - text.rfind("\n", 0, error.pos)
        raise DataError(
            f"{where} is not valid JSON at column {column}: {error.msg.lower()}",
            "each line must be one complete JSON object",
        ) from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply to read", "flatten that row") from error
    except DataError:
        raise
    except ValueError as error:  # a number of more digits than Python converts
        raise DataError(f"{where} cannot be read: {error}", "correct that line") from error


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _JSON_NAMES.get(type(value), f"the number {value}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is {_kind(value)}, wanted an object",
            'write each sample as {"instruction": …, "output": …}',
        )
    return value


def _format_of(row: dict[str, Any], where: str, expected: str | None) -> str:
    fitting = [name for name, keys in FORMATS.items() if all(key in row for key in keys)]
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
    raise DataError(f"{where}: found the keys {found}, wanted {' or '.join(FORMATS)}", hint)


def _text(value: Any, key: str, where: str) -> str:
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {_kind(value)}, wanted text", "correct that row")
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


def _from_pair(row: dict[str, Any], kind: str, where: str) -> tuple[dict[str, str], ...] | None:
    prompt_key, response_key = FORMATS[kind]
    prompt = _text(row[prompt_key], prompt_key, where)
    response = _text(row[response_key], response_key, where)
    if not prompt.strip():
        raise DataError(f"{where}: {prompt_key!r} is empty, wanted text", "correct that row")
    if "input" in _OPTIONAL[kind] and row.get("input") is not None:
        context = _text(row["input"], "input", where)
        prompt = f"{prompt}\n\n{context}" if context.strip() else prompt
    if not response.strip():
        return None
    system = row.get("system")
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    if system is not None and _text(system, "system", where).strip():
        turns.insert(0, {"role": "system", "content": system})
    return tuple(turns)


def _from_messages(row: dict[str, Any], where: str) -> tuple[dict[str, str], ...] | None:
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        what = "empty" if turns == [] else _kind(turns)
        raise DataError(
            f"{where}: 'messages' is {what}, wanted a list of turns", "correct that row"
        )
    read = [_turn(turn, f"messages[{i}]", where) for i, turn in enumerate(turns)]
    while read and read[-1]["role"] != "assistant":
        read.pop()  # what follows the last answer has nothing to teach
    if not read:
        raise DataError(f"{where}: no turn has the role 'assistant'", "each sample needs an answer")
    return tuple(read) if read[-1]["content"].strip() else None


def _turn(turn: Any, name: str, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {name} is {_kind(turn)}, wanted an object", "correct that row")
    for key in ("role", "content"):
        if key not in turn:
            hint = "rename 'from' and 'value'" if "from" in turn else "add it"
            raise DataError(f"{where}: {name} has no key {key!r}", hint)
    if turn["role"] not in _ROLES:
        raise DataError(
            f"{where}: {name}.role is {turn['role']!r}, wanted {', '.join(_ROLES)}",
            "correct that row",
        )
    return {"role": turn["role"], "content": _text(turn["content"], f"{name}.content", where)}
