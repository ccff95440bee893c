"""A blob as what it has in common with another one: the ranks of one world write nearly equal artifacts.

Owns the form. Each build stamps its date and random names into an artifact, and a rank its device number, so that
files of one meaning share no digest: 35 of 455,427 bytes differ between two ranks. Such a file is kept as copies out of
a base blob and the bytes between them. What comes out is exactly what went in: the caller hashes it, as it does any
blob. Standard library only.

In bytes, numbers as in LEB128 (seven bits a byte, the lowest first):

    "ccdelta1", SHA-256 of the base blob (32 bytes), size of what comes out, number of parts,
    each part: where it begins in the base as the distance from where it was expected (zigzag), bytes to copy, bytes of
    its own; expected is the end of the last copy plus the bytes of its own that followed, since most differences
    replace, then all bytes of its own
"""

from __future__ import annotations

from collections.abc import Iterator

from cachectl.errors import DocumentError
from cachectl.schemas.canonical import DIGEST_PREFIX
from cachectl.values import dataclass

__all__ = ["DELTA_LIMIT_BYTES", "Delta", "encode_delta"]

_MAGIC = b"ccdelta1"
_DIGEST_BYTES = 32
# Both sides are held in memory; what is larger is stored whole.
DELTA_LIMIT_BYTES = 64 << 20
# Equal bytes between two differences that are worth a part of their own.
_GAP_BYTES = 8


@dataclass(frozen=True)
class Delta:
    """A blob's delta, read: against which base, how many bytes it stands for, and how they come about.

    `parts` are (offset in the base, bytes to copy, bytes of its own).
    """

    base: str
    size_bytes: int
    parts: tuple[tuple[int, int, int], ...]
    own: bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> Delta:
        """Read a delta.

        Raises:
            DocumentError: malformed, or of another form.
        """
        head = len(_MAGIC) + _DIGEST_BYTES
        if not data.startswith(_MAGIC) or len(data) <= head:
            raise DocumentError("blob delta is malformed: another form")
        numbers = _numbers(data, head)
        parts, expected = [], 0
        try:
            (size_bytes, _), (count, place) = next(numbers), next(numbers)
            for _ in range(count):
                (distance, _), (copied, _), (own, place) = next(numbers), next(numbers), next(numbers)
                offset = expected + (distance >> 1 ^ -(distance & 1))
                parts.append((offset, copied, own))
                expected = offset + copied + own
        except StopIteration as error:
            raise DocumentError("blob delta is malformed: it ends too early") from error
        rest = data[place:]
        lengths = sum(copied + own for _, copied, own in parts), sum(own for _, _, own in parts)
        if lengths != (size_bytes, len(rest)) or size_bytes > DELTA_LIMIT_BYTES or any(part[0] < 0 for part in parts):
            raise DocumentError("blob delta is malformed: its parts make another size")
        return cls(DIGEST_PREFIX + data[len(_MAGIC) : head].hex(), size_bytes, tuple(parts), rest)

    def to_bytes(self) -> bytes:
        """Return the delta as it is stored."""
        numbers, expected = [self.size_bytes, len(self.parts)], 0
        for offset, copied, own in self.parts:
            distance = offset - expected
            numbers += [distance << 1 if distance >= 0 else (-distance << 1) - 1, copied, own]
            expected = offset + copied + own
        digest = bytes.fromhex(self.base.removeprefix(DIGEST_PREFIX))
        return b"".join([_MAGIC, digest, *map(_number, numbers), self.own])

    def apply(self, base: bytes) -> bytes:
        """Return the bytes that the delta stands for; of a base that is damaged they are others."""
        made = bytearray()
        place = 0
        for offset, copied, own in self.parts:
            made += base[offset : offset + copied]
            made += self.own[place : place + own]
            place += own
        return bytes(made)


def encode_delta(base: bytes, base_digest: str, data: bytes) -> bytes | None:
    """Return the delta of `data` against `base`; None where it would take more than a quarter of the bytes.

    Lines are matched in order, then bytes within a line that differs: artifacts are text for the most part, and most
    differences replace as many bytes. Time and memory are linear.
    """
    if max(len(base), len(data)) > DELTA_LIMIT_BYTES:
        return None
    parts: list[tuple[int, int, int]] = []
    own = bytearray()
    # A part is a copy and what follows it.
    offset, copied, literal = 0, 0, 0
    for start, length, text in _matches(base, data):
        if text:
            literal += len(text)
            own += text
        elif not literal and start == offset + copied:
            copied += length
        else:
            if copied or literal:
                parts.append((offset, copied, literal))
            offset, copied, literal = start, length, 0
    if copied or literal:
        parts.append((offset, copied, literal))
    made = Delta(base_digest, len(data), tuple(parts), bytes(own)).to_bytes()
    return made if 4 * len(made) <= len(data) else None


def _matches(base: bytes, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset in base, length, b"") for what is copied and (0, 0, bytes) for what is not, in order."""
    lines = base.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    places: dict[bytes, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line, []).append(number)
    expected = 0
    for line in data.splitlines(keepends=True):
        if expected < len(lines) and lines[expected] == line:
            yield starts[expected], len(line), b""
            expected += 1
            continue
        # Lines that stand for themselves say where both texts meet again; others may stand anywhere.
        alike = places.get(line, ())
        if len(alike) == 1:
            yield starts[alike[0]], len(line), b""
            expected = alike[0] + 1
            continue
        other = lines[expected] if expected < len(lines) else b""
        yield from _within(other, starts[min(expected, len(lines))], line)
        expected += 1


def _within(other: bytes, start: int, line: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Match a line with the one that stands in its place."""
    head = _common(line, other)
    tail = _common(line[head:][::-1], other[head:][::-1])
    if head:
        yield start, head, b""
    middle, replaced = line[head : len(line) - tail], other[head : len(other) - tail]
    if len(middle) == len(replaced):
        yield from _replaced(replaced, start + head, middle)
    elif middle:
        yield 0, 0, middle
    if tail:
        yield start + len(other) - tail, tail, b""


def _replaced(old: bytes, start: int, new: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Match texts of one length byte by byte; short equal stretches go with the differences around them."""
    differing = [place for place, (one, other) in enumerate(zip(old, new, strict=True)) if one != other]
    done = 0
    while differing:
        first = differing[0]
        last = first
        for count, place in enumerate(differing):
            if place - last > _GAP_BYTES:
                differing = differing[count:]
                break
            last = place
        else:
            differing = []
        if first > done:
            yield start + done, first - done, b""
        yield 0, 0, new[first : last + 1]
        done = last + 1
    if done < len(new):
        yield start + done, len(new) - done, b""


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _numbers(data: bytes, place: int) -> Iterator[tuple[int, int]]:
    """Yield each number from `place` on, and where the next one begins."""
    value, shift = 0, 0
    for next_place, byte in enumerate(data[place:], place + 1):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value, next_place
            value, shift = 0, 0
        elif shift > 63:
            return
