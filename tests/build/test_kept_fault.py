"""A recorder's fault is its reader's to hear of, and nobody else's."""

from __future__ import annotations

import pytest

from cachectl.build.kept_fault import KeptFault


def test_kept_fault_is_raised_to_the_reader_only() -> None:
    """The first one counts: what follows is mostly its doing."""
    fault = KeptFault()
    fault.raise_kept()
    assert not fault

    for name in ("first", "second"):
        with fault.kept():
            raise KeyError(name)

    assert fault
    with pytest.raises(KeyError, match="first"):
        fault.raise_kept()


def test_kept_fault_lets_an_interruption_pass() -> None:
    """Whoever stops the program is no fault of a recorder's."""
    fault = KeptFault()

    with pytest.raises(KeyboardInterrupt), fault.kept():
        raise KeyboardInterrupt

    assert not fault
