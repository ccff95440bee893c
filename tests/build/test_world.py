"""Which errors say no more than that another rank is gone."""

from __future__ import annotations

import pytest

from cachectl.build.world import is_of_peer


class DistNetworkError(RuntimeError):
    """Named as torch's own."""


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """Return an error as it was raised from another one."""
    error.__cause__ = cause
    return error


# Texts of torch 2.13 with gloo, and of torch_npu's hccl.
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"
        ),
        RuntimeError("Connection reset by peer"),
        RuntimeError("[../gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms for recv operation to complete"),
        DistNetworkError("failed to recv, got 0 bytes"),
        raised(ValueError("wrapped"), RuntimeError("Broken pipe")),
        RuntimeError("The Inner error: HCCL function error: HcclAllReduce, remote op timeout"),
    ],
)
def test_error_of_a_lost_peer_is_an_echo(error: Exception) -> None:
    """Whatever it is wrapped in."""
    assert is_of_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no weights at /nowhere"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        KeyError("peer"),
        raised(ValueError("x"), KeyError("rank")),
    ],
)
def test_error_of_the_rank_itself_is_none(error: Exception) -> None:
    """These are to be told first."""
    assert not is_of_peer(error)


def test_errors_that_cause_each_other_end() -> None:
    """A chain that bites its tail is walked once."""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one

    assert not is_of_peer(one)
