"""A fault of a recorder's inside somebody else's compile: kept, and raised by whoever reads what was recorded.

Dynamo would take an exception of ours for one of the model's, and a program's compile is not ours to fail. Rank
processes, and a program under `exec --record`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["KeptFault"]


class KeptFault:
    """The first exception that a recorder raised while a compile went on."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is raised within; code that is traced may make a recorder raise anything."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self._error = self._error or error

    def raise_kept(self) -> None:
        """Raise what was kept, if anything was."""
        if self._error is not None:
            raise self._error
