"""Faulty forms of a compiled kernel's PTX: one instruction less, one comparison off by one, one mask gone.

Each mutant changes one place and keeps the line numbers of the text. ``barrier`` and ``wait`` delete what
orders memory; ``compare`` turns a comparison into its neighbour (``<`` into ``<=``, ``==`` into ``!=``);
``mask`` lets a guarded access to global memory happen on every lane.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

__all__ = ["KINDS", "Mutant", "mutants"]

_LINE = r"(?m)^[^\S\n]*(?:@!?%p\d+[^\S\n]+)?"
_BARRIER = re.compile(_LINE + r"(?:bar|barrier)\.(?:cta\.)?sync\b[^\n;]*;")
_WAIT = re.compile(
    _LINE + r"(?:cp\.async\.(?:bulk\.)?wait_(?:group|all)|wgmma\.wait_group)\b[^\n;]*;"
    r"|(?m:^)[^\n]*mbarrier\.try_wait[^\n;]*;\s*@!?\S+\s+bra[^\n;]*;"
)
_COMPARE = re.compile(r"\bsetp\.(lt|le|gt|ge|eq|ne)(?=u?\.)")
_MASK = re.compile(
    r"(?P<guard>@!?%p\d+)(?=[^\S\n]+(?:ld|st)\.global\b)"
    r"|cp\.async\.c[ag]\.shared\.global[^\n;]*,\s*(?P<size>0x[0-9a-f]+),\s*(?P<source>%r\d+)\s*;"
)
_NEIGHBOUR = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to a kernel's PTX.

    Attributes:
        kind: A name of :data:`KINDS`.
        line: The PTX line it changes, counted from 1.
        source: File and line of the Triton source that line was compiled from; empty if unknown.
        instruction: The PTX as it was.
        ptx: The whole text with the change.
    """

    kind: str
    line: int
    source: str
    instruction: str
    ptx: str


def _blank(match: re.Match[str]) -> tuple[int, int, str]:
    return match.start(), match.end(), "\n" * match[0].count("\n")


def _neighbour(match: re.Match[str]) -> tuple[int, int, str]:
    return match.start(1), match.end(1), _NEIGHBOUR[match[1]]


def _unmask(match: re.Match[str]) -> tuple[int, int, str]:
    if match["guard"]:
        return match.start("guard"), match.end("guard"), ""
    return match.start("source"), match.end("source"), match["size"]


_Edit = Callable[[re.Match[str]], tuple[int, int, str]]
KINDS: dict[str, tuple[re.Pattern[str], _Edit]] = {
    "barrier": (_BARRIER, _blank),
    "wait": (_WAIT, _blank),
    "compare": (_COMPARE, _neighbour),
    "mask": (_MASK, _unmask),
}


def mutants(ptx: str, kinds: tuple[str, ...] = tuple(KINDS), limit: int = 0) -> list[Mutant]:
    """Return every mutant of these kinds; at most ``limit`` of a kind, evenly spaced, if it is not 0."""
    found = []
    for kind in kinds:
        pattern, edit = KINDS[kind]
        places = list(pattern.finditer(ptx))
        if limit and len(places) > limit:
            places = [places[i * len(places) // limit] for i in range(limit)]
        found += [_mutant(ptx, kind, place, edit(place)) for place in places]
    return found


def _mutant(ptx: str, kind: str, place: re.Match[str], change: tuple[int, int, str]) -> Mutant:
    start, end, new = change
    begins, ends = ptx.rfind("\n", 0, start) + 1, ptx.find("\n", end)
    return Mutant(
        kind=kind,
        line=ptx.count("\n", 0, place.start() + len(place[0]) - len(place[0].lstrip())) + 1,
        source=_source(ptx, start),
        instruction=" ".join(ptx[min(begins, place.start()) : ends].split()),
        ptx=ptx[:start] + new + ptx[end:],
    )


def _source(ptx: str, position: int) -> str:
    """Return the file and line that the last ``.loc`` before a position names."""
    places = re.findall(r"\.loc\s+(\d+)\s+([1-9]\d*)", ptx[:position])
    if not places:
        return ""
    number, line = places[-1]
    file = re.search(rf'\.file\s+{number}\s+"(?:[^"]*/)?([^"/]+)"', ptx)
    return f"{file[1] if file else '?'}:{line}"
