"""Instruction data from a JSON Lines file (one object a line) or a file that is one JSON array.

One format a file (``sample_formats`` lists them), told by its keys, checked row by row before anything
is trained. Keys that are not used are passed over and listed. A row whose response is empty teaches
nothing: it is skipped and counted. Everything else that cannot be used stops the reading with the
file, the line, the key and what was found.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entrenar.errors import DataError
from entrenar.finetune.sample_formats import (
    FORMATS,
    Conversation,
    format_of,
    kind_of,
    read_row,
    unused_keys,
)

__all__ = ["FORMATS", "Conversation", "Corpus", "read_corpus"]


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
        kind = format_of(row, where, first[0] if first else None)
        first = first or (kind, line)
        if kind != first[0]:
            raise DataError(
                f"{where} has the format {kind}, but line {first[1]} has {first[0]}",
                "one file holds one format; split it",
            )
        ignored.update(dict.fromkeys(unused_keys(row, kind)))
        sample = read_row(row, kind, line, where)
        if sample is None:
            empty.append(line)
        else:
            found.append(sample)
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


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is {kind_of(value)}, wanted an object",
            'write each sample as {"instruction": …, "output": …}',
        )
    return value
