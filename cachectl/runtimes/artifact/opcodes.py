"""What bytecode of each CPython minor looks like: valid opcodes and inline cache entries.

Data only. The layout of a marshalled code object is the same from 3.11 on, and no version number stands in it, so the
instructions themselves have to tell the minor. From each interpreter's own `opcode` module (`opmap`,
`_inline_cache_entries`), specialised and instrumented forms left out: neither is ever marshalled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DIALECTS", "Dialect"]


@dataclass(frozen=True)
class Dialect:
    """One minor's instruction set, as far as recognising it needs.

    `caches` maps an opcode to the code units of inline cache after it, which are zero in marshalled code. `resume` is
    the opcode every code object holds, where there is one. `name_shift` maps opcodes whose argument indexes `co_names`
    to the bits below the index.
    """

    minor: str
    valid: frozenset[int]
    caches: Mapping[int, int]
    extended_arg: int
    load_const: int
    resume: int | None
    name_shift: Mapping[int, int]

    @property
    def has_localsplus(self) -> bool:
        """Whether code objects are marshalled in the layout that came with 3.11."""
        return self.resume is not None


def _opcodes(ranges: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in ranges.split():
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


DIALECTS = (
    Dialect(
        minor="3.10",
        valid=_opcodes(
            "1-6 9-12 15-17 19-20 22-34 49-52 54-57 59-79 82-87 89-119 121-122 124-126 129-133 135-138 141-148 152 "
            "154-157 160-165"
        ),
        caches={},
        extended_arg=144,
        load_const=100,
        resume=None,
        name_shift={106: 0, 116: 0},
    ),
    Dialect(
        minor="3.11",
        valid=_opcodes(
            "1-2 9-12 15 25 30-33 35-37 49-54 60-61 68-71 74-75 82-112 114-120 122-126 128-140 142 144-149 151-152 "
            "155-157 160 162-166 171-176"
        ),
        caches={25: 4, 60: 1, 92: 1, 95: 4, 106: 4, 107: 2, 116: 5, 122: 1, 160: 10, 166: 1, 171: 4},
        extended_arg=144,
        load_const=100,
        resume=151,
        name_shift={106: 0, 116: 1},
    ),
    Dialect(
        minor="3.12",
        valid=_opcodes(
            "1-5 9 11-12 15 17 25-27 30-33 35-37 49-55 60-61 68-69 71 74-75 83 85 87 89-110 114-147 149-152 155-157 "
            "162-165 171-176"
        ),
        caches={25: 1, 60: 1, 92: 1, 93: 1, 95: 4, 106: 9, 107: 1, 116: 4, 122: 1, 123: 1, 141: 1, 171: 3},
        extended_arg=144,
        load_const=100,
        resume=151,
        name_shift={106: 1, 116: 1},
    ),
    Dialect(
        minor="3.13",
        valid=_opcodes("1-2 4-118 149"),
        caches={
            5: 1, 39: 1, 40: 3, 45: 1, 53: 3, 58: 1, 59: 1, 72: 1, 77: 1, 82: 9, 91: 4, 93: 1, 97: 1, 98: 1, 99: 1,
            100: 1, 104: 1, 108: 4, 117: 1,
        },
        extended_arg=71,
        load_const=83,
        resume=149,
        name_shift={82: 1, 91: 1},
    ),
)  # fmt: skip
