"""A picture of what a tape has recorded: text, Graphviz' DOT, or an image through its ``dot``."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrenar.autograd.node import Edge, Node
from entrenar.autograd.stream import Stream
from entrenar.autograd.tensor import Slot, Tensor
from entrenar.errors import ConfigError

__all__ = ["draw"]

_TEXTS = (".txt", ".dot", ".gv")
_IMAGES = (".svg", ".png", ".pdf")
_COLOURS = ("#dbeafe", "#dcfce7", "#fef3c7", "#fce7f3", "#ede9fe", "#e2e8f0")  # one for each stream


class _Picture:
    """Numbers what is drawn by its place on the tape, so that equal tapes give equal pictures."""

    def __init__(self, nodes: Sequence[Node], token: object) -> None:
        self.nodes = nodes
        self.token = token
        self.streams: dict[Stream, int] = {}
        self.leaves: dict[Tensor, int] = {}
        self.sources: dict[Slot, tuple[int, int]] = {}
        for at, node in enumerate(nodes):
            self.streams.setdefault(node.stream, len(self.streams))
            for edge in node.edges:
                if isinstance(edge, Tensor):
                    self.leaves.setdefault(edge, len(self.leaves))
            self.sources |= {slot: (at, i) for i, slot in enumerate(node.outputs)}

    def name(self, leaf: Tensor) -> str:
        return " ".join(leaf.name.splitlines()) or f"leaf {self.leaves[leaf]}"

    def saved(self, nodes: Sequence[Node]) -> tuple[int, int]:
        """Return bytes that the nodes keep alive: made on the tape, and from outside; each storage once."""
        held: dict[object, tuple[int, bool]] = {}
        for node in nodes:
            held |= {key: (count, owner is self.token) for key, count, owner in node.held()}
        inside = sum(count for count, made in held.values() if made)
        return inside, sum(count for count, made in held.values() if not made)

    def summary(self) -> str:
        inside, outside = self.saved(self.nodes)
        streams = f"{len(self.streams)} stream{'s' if len(self.streams) != 1 else ''}"
        return (
            f"{len(self.nodes)} ops on {streams}, {len(self.leaves)} leaves; saved for backward: "
            f"{_bytes(inside)} made on the tape, {_bytes(outside)} from outside"
        )

    def text(self) -> str:
        rows = [("#", "op", "stream", "inputs", "outputs", "saves", "from outside")]
        for at, node in enumerate(self.nodes):
            inside, outside = self.saved([node])
            inputs = ", ".join(self._source(edge) for edge in node.edges)
            outputs = ", ".join(_form(slot) for slot in node.outputs)
            stream = str(self.streams[node.stream])
            rows.append(
                (str(at), node.op, stream, inputs, outputs, _bytes(inside), _bytes(outside))
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self.summary()]) + "\n"

    def _source(self, edge: Edge) -> str:
        if edge is None:
            return "-"
        if isinstance(edge, Tensor):
            return self.name(edge)
        if edge not in self.sources:
            return "freed"
        at, output = self.sources[edge]
        return f"#{at}" if len(self.nodes[at].outputs) == 1 else f"#{at}.{output}"

    def dot(self) -> str:
        lines = [
            "digraph tape {",
            f"  label={_quoted(self.summary())}; labelloc=t; fontname=Helvetica;",
            "  node [shape=box, style=filled, fontname=Helvetica, fontsize=11];",
            "  edge [fontname=Helvetica, fontsize=9];",
        ]
        for leaf, number in self.leaves.items():
            label = _quoted(self.name(leaf), _form(leaf))
            lines.append(f"  leaf{number} [label={label}, shape=ellipse, fillcolor=white];")
        for at, node in enumerate(self.nodes):
            lines += self._dot_node(at, node)
        return "\n".join([*lines, "}"]) + "\n"

    def _dot_node(self, at: int, node: Node) -> list[str]:
        inside, outside = self.saved([node])
        stream = self.streams[node.stream]
        keeps = f"stream {stream}, saves {_bytes(inside)}"
        also = [f"and {_bytes(outside)} from outside"] if outside else []
        forms = [_form(slot) for slot in node.outputs]
        label = _quoted(f"{at}: {node.op}", *forms, keeps, *also)
        lines = [
            f"  op{at} [label={label}, fillcolor={_quoted(_COLOURS[stream % len(_COLOURS)])}];"
        ]
        for edge in node.edges:
            if isinstance(edge, Tensor):
                lines.append(f"  leaf{self.leaves[edge]} -> op{at};")
            elif edge in self.sources:
                source, output = self.sources[edge]
                several = len(self.nodes[source].outputs) > 1
                lines.append(f"  op{source} -> op{at}{f' [label={output}]' if several else ''};")
        return lines


def draw(nodes: Mapping[int, Node], token: object, path: str | Path | None = None) -> str:
    """Draw recorded ops; see ``Tape.draw``."""
    picture = _Picture(list(nodes.values()), token)
    if path is None:
        return picture.text()
    path = Path(path)
    kind = path.suffix.lower()
    if kind in _IMAGES:
        source = picture.dot()
        content = _rendered(source, kind[1:], path)
    elif kind in _TEXTS:
        source = picture.text() if kind == ".txt" else picture.dot()
        content = source.encode()
    else:
        raise ConfigError(
            f"draw: the path ends in {path.suffix!r}, wanted {', '.join(_TEXTS + _IMAGES)}", ""
        )
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
    return source


def _rendered(source: str, kind: str, path: Path) -> bytes:
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            f"draw: {path} needs Graphviz, whose program dot is not on the path",
            f"install graphviz, or write {path.with_suffix('.dot')} or a .txt instead",
        )
    done = subprocess.run(
        [program, f"-T{kind}"], input=source.encode(), capture_output=True, check=False
    )
    if done.returncode != 0:
        raise ConfigError(f"draw: dot failed: {done.stderr.decode().strip()}", "")
    return done.stdout


def _form(of: Slot | Tensor) -> str:
    return f"{str(of.dtype).removeprefix('torch.')} {of.shape}"


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.1f} {unit}"


def _quoted(*lines: str) -> str:
    """Return lines as one quoted string of DOT."""
    safe = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + "\\n".join(safe) + '"'
