"""Instruction pairs from the docstrings of the running Python's own standard library.

"What does `textwrap.dedent(text)` do?" → the first sentence of its docstring. Thousands of real
pairs that nobody wrote for training, the same on every machine with the same Python version: the
modules are read from their source in sorted order and parsed, never imported; the built-in
functions and types, which have no source, are inspected.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import hashlib
import inspect
import json
import re
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from entrenar.errors import DataError

__all__ = ["DocstringPair", "build_docstring_pairs", "split_pairs", "write_pairs"]

HELDOUT_SHARE = 10  # one pair (with all that resemble it) in this many is held out
SIMILAR = 0.7  # answers whose words overlap this much (Jaccard) stay on one side of the split
_SKIPPED = frozenset(
    (
        *("test", "tests", "idlelib", "turtle", "turtledemo", "antigravity", "this", "lib2to3"),
        *("ensurepip", "distutils", "site-packages", "dist-packages", "pydoc_data"),
    )
)
_MIN_LENGTH, _MAX_LENGTH = 25, 240
_MAX_SIGNATURE = 80


@dataclasses.dataclass(frozen=True)
class DocstringPair:
    """One pair: a question about a name of the standard library, and its docstring's sentence."""

    instruction: str
    response: str
    name: str


def build_docstring_pairs(stdlib: str | Path | None = None) -> list[DocstringPair]:
    """Return every pair of the standard library, without duplicates, in a fixed shuffled order.

    Args:
        stdlib: Folder of the library's source; the running Python's where not given.

    Raises:
        DataError: The folder holds no Python source (some distributions ship bytecode alone).
    """
    root = Path(stdlib if stdlib is not None else sysconfig.get_paths()["stdlib"])
    found = [pair for path, module in _modules(root) for pair in _pairs_of_module(path, module)]
    if not found:
        raise DataError(
            f"{root} holds no Python source with docstrings",
            "install the full standard library, or use your own data with `entrenar train`",
        )
    if stdlib is None:
        found += _builtin_pairs()
    unique: dict[str, DocstringPair] = {}
    asked: set[str] = set()
    for pair in found:
        key = " ".join(_words(pair.response))
        if key not in unique and pair.instruction not in asked:
            unique[key] = pair
            asked.add(pair.instruction)
    return sorted(unique.values(), key=lambda pair: _digest(pair.instruction))


def split_pairs(pairs: Iterable[DocstringPair]) -> tuple[list[DocstringPair], list[DocstringPair]]:
    """Split pairs into training and held-out ones; pairs that resemble each other stay together.

    Two pairs resemble each other when their answers share most words, or when they ask about the
    same last name and the answers start alike. The choice hashes the group, so it does not depend
    on how many pairs there are.
    """
    pairs = list(pairs)
    groups = _groups(pairs)
    train: list[DocstringPair] = []
    heldout: list[DocstringPair] = []
    for pair, group in zip(pairs, groups, strict=True):
        (train if int(_digest(group), 16) % HELDOUT_SHARE else heldout).append(pair)
    return train, heldout


def write_pairs(path: str | Path, pairs: Iterable[DocstringPair]) -> int:
    """Write pairs as JSON Lines with the keys ``instruction`` and ``response``.

    Returns:
        How many were written.
    """
    lines = [
        json.dumps({"instruction": p.instruction, "response": p.response}, ensure_ascii=False)
        for p in pairs
    ]
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


# reading the source


def _modules(root: Path, prefix: str = "") -> Iterator[tuple[Path, str]]:
    """Yield the files and names of the public modules below a folder, in sorted order."""
    for path in sorted(root.iterdir() if root.is_dir() else ()):
        name = path.stem if path.suffix == ".py" else path.name
        if name == "__init__" and prefix:
            yield path, prefix.removesuffix(".")
        elif name.startswith("_") or not name.isidentifier() or name in _SKIPPED:
            continue
        elif path.suffix == ".py":
            yield path, prefix + name
        elif path.is_dir():
            yield from _modules(path, f"{prefix}{name}.")


def _pairs_of_module(path: Path, module: str) -> Iterator[DocstringPair]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # a template or a test fixture, not a module
    yield from _pairs_of_body(tree.body, module, in_class=False)


def _pairs_of_body(body: list[ast.stmt], prefix: str, in_class: bool) -> Iterator[DocstringPair]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        is_class = isinstance(node, ast.ClassDef)
        signature = "" if isinstance(node, ast.ClassDef) else _signature(node, in_class)
        pair = _pair(name, signature, ast.get_docstring(node), is_class)
        if pair is not None:
            yield pair
        if isinstance(node, ast.ClassDef):
            yield from _pairs_of_body(node.body, name, in_class=True)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> str:
    """Return the arguments as one would call them: no annotations, no self."""
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for star in (arguments.vararg, arguments.kwarg):
        if star is not None:
            star.annotation = None
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    text = ast.unparse(arguments)
    if in_class and not static:
        text = re.sub(r"^(self|cls|mcls)(, (/, )?|$)", "", text)
    return f"({text})"


# the built-ins, which have no source


def _builtin_pairs() -> Iterator[DocstringPair]:
    for name, value in sorted(vars(builtins).items()):
        if name.startswith("_") or not callable(value):
            continue
        if isinstance(value, type):
            if getattr(value, "__module__", "") != "builtins":
                continue
            yield from _maybe(_pair(name, "", inspect.getdoc(value), is_class=True))
            for method, member in sorted(vars(value).items()):
                is_method = isinstance(
                    member, (types.MethodDescriptorType, types.ClassMethodDescriptorType)
                )
                if not method.startswith("_") and is_method:
                    signature = _inspected(member)
                    doc = inspect.getdoc(member)
                    yield from _maybe(_pair(f"{name}.{method}", signature, doc, is_class=False))
        elif isinstance(value, types.BuiltinFunctionType):
            yield from _maybe(_pair(name, _inspected(value), inspect.getdoc(value), is_class=False))


def _inspected(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (ValueError, TypeError):
        return ""  # a built-in without a text signature
    text = re.sub(r"^\((\$?(self|type)(, /)?(, )?)", "(", text)
    return re.sub(r"(, )?/(?=[,)])", "", text).replace("(, ", "(")


def _maybe(pair: DocstringPair | None) -> list[DocstringPair]:
    return [] if pair is None else [pair]


def _pair(name: str, signature: str, doc: str | None, is_class: bool) -> DocstringPair | None:
    answer = _first_sentence(doc or "")
    if answer is None:
        return None
    if len(signature) > _MAX_SIGNATURE:
        signature = "()"
    question = f"What is `{name}`?" if is_class else f"What does `{name}{signature}` do?"
    return DocstringPair(question, answer, name)


def _first_sentence(doc: str) -> str | None:
    """Return the first sentence of a docstring as one line; None where it has none worth asking."""
    doc = "\n".join(line.strip() for line in doc.strip().splitlines())
    paragraphs = [" ".join(p.split()) for p in doc.split("\n\n")]
    if len(paragraphs) > 1 and re.match(r"^[\w.]+\(.*\)( -> .*)?$", paragraphs[0]):
        paragraphs.pop(0)  # old built-ins repeat the signature first
    text = paragraphs[0]
    end = re.search(r"(?<!e\.g)(?<!i\.e)(?<!etc)[.!?](?=\s+[A-Z`'\"(]|\s*$)", text)
    text = text[: end.end()] if end else text.rstrip(":;, ") + "."
    plain = text.isprintable() and text[:1].isalpha() and ">>>" not in text and " -> " not in text
    if plain and _MIN_LENGTH <= len(text) <= _MAX_LENGTH and len(_words(text)) >= 4:
        return text[0].upper() + text[1:]
    return None


# pairs that resemble each other


def _groups(pairs: list[DocstringPair]) -> list[str]:
    """Return for each pair the question that names its group: the least of all in it."""
    parent = list(range(len(pairs)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in _resembling(pairs):
        parent[root(a)] = root(b)
    members: dict[int, list[str]] = collections.defaultdict(list)
    for i, pair in enumerate(pairs):
        members[root(i)].append(pair.instruction)
    names = {key: min(group) for key, group in members.items()}
    return [names[root(i)] for i in range(len(pairs))]


def _resembling(pairs: list[DocstringPair]) -> Iterator[tuple[int, int]]:
    by_name: dict[tuple[str, ...], int] = {}
    words = [frozenset(_words(pair.response)) for pair in pairs]
    for i, pair in enumerate(pairs):
        key = (pair.name.rpartition(".")[2], *_words(pair.response)[:3])
        yield i, by_name.setdefault(key, i)
    # Sets that overlap by SIMILAR share one of their rarest words (the prefix filter of set joins).
    counts = collections.Counter(word for group in words for word in group)
    seen: dict[str, list[int]] = collections.defaultdict(list)
    for i, group in enumerate(words):
        rare = sorted(group, key=lambda word: (counts[word], word))
        prefix = rare[: len(rare) - int(-(-SIMILAR * len(rare) // 1)) + 1]
        candidates = {j for word in prefix for j in seen[word]}
        for j in sorted(candidates):
            if len(group & words[j]) >= SIMILAR * len(group | words[j]):
                yield i, j
        for word in prefix:
            seen[word].append(i)
