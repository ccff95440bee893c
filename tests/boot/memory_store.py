"""A rendezvous store within one process: what torch's TCPStore does with the calls that the agreement makes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class MemoryStore:
    """Keys and values of several threads; `asked` counts the calls."""

    values: dict[str, bytes] = field(default_factory=dict)
    asked: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set what is not there, or what is as expected; return what stands."""
        with self._lock:
            self.asked += 1
            stands = self.values.get(key)
            if stands is None and expected_value:
                return expected_value.encode()
            if stands is None or stands == expected_value.encode():
                self.values[key] = desired_value.encode()
            return self.values[key]

    def add(self, key: str, value: int) -> int:
        """Count up; return the count."""
        with self._lock:
            self.asked += 1
            count = int(self.values.get(key, b"0")) + value
            self.values[key] = str(count).encode()
            return count

    def check(self, keys: list[str]) -> bool:
        """Say whether all are there."""
        with self._lock:
            self.asked += 1
            return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        with self._lock:
            self.asked += 1
            return self.values[key]
