"""Every error cachectl raises on purpose, in one tree; each carries the exit code of the contract.

A miss, a mismatch and a finding of verify are values, not exceptions. What stands here ends a command: the CLI entry
prints `str(error)` on one line and exits with `error.exit_code`. Messages say what, which value, and what to run next.
Standard library only; imports nothing of ours.

    CachectlError
    |- ConfigError (2)            recipe, option, unknown key: what the caller wrote
    |- EnvironmentFault (3)       what surrounds us: no NPU, no compiler, no runtime
    |  `- SimulationError         the simulated CANN could not be made or used
    |- StoreError (3)             the store's files
    |  |- ArtifactNotFoundError   a blob or manifest is not there
    |  |- ArtifactCorruptedError  bytes are not what their digest says
    |  |- StoreReadOnlyError
    |  `- StoreLockTimeoutError   also a TimeoutError
    |- ManifestError (3)          the database over the store
    |  |- SchemaBehindError       older than this program: run `cachectl db upgrade`
    |  |- SchemaAheadError        newer than this program: refuse
    |  `- ManifestConflictError
    |- DocumentError (3)          a stored document that is malformed or newer than this program
    `- BuildError (1)             an entry that could not be built; carries the upstream text
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "ArtifactCorruptedError",
    "ArtifactNotFoundError",
    "BuildError",
    "CachectlError",
    "ConfigError",
    "DocumentError",
    "EnvironmentFault",
    "ManifestConflictError",
    "ManifestError",
    "SchemaAheadError",
    "SchemaBehindError",
    "SimulationError",
    "StoreError",
    "StoreLockTimeoutError",
    "StoreReadOnlyError",
]


class CachectlError(Exception):
    """Base of all; `hint` is the command or change that mends it, printed after the message."""

    exit_code = 3
    # The rank in whose process it was raised, where a build's ranks report it.
    rank: int | None = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own reduce passes `args` only and would drop keyword data on the way between processes.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(kind: type[CachectlError], args: tuple[object, ...], state: dict[str, object]) -> CachectlError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(CachectlError):
    """What the caller wrote is wrong: recipe, option, key, import path, method or arity."""

    exit_code = 2


class EnvironmentFault(CachectlError):
    """The machine lacks what the command needs: a device, a library, a compiler, a runtime."""


class SimulationError(EnvironmentFault):
    """The simulated CANN could not be compiled, found or used."""


class StoreError(CachectlError):
    """The store's files can't be read or written."""


class ArtifactNotFoundError(StoreError):
    """A blob, manifest or record that a document names is not in the store."""


class ArtifactCorruptedError(StoreError):
    """Bytes in the store are not what their digest says."""

    def __init__(self, message: str, *, path: Path | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path


class StoreReadOnlyError(StoreError):
    """The store can be read but not written by this user."""


class StoreLockTimeoutError(StoreError, TimeoutError):
    """A lock was not free in time; the message names its holder where that is known."""

    def __init__(self, message: str, *, lock_path: Path, timeout_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.lock_path = lock_path
        self.timeout_s = timeout_s


class ManifestError(CachectlError):
    """The database over the store can't be used."""


class SchemaBehindError(ManifestError):
    """The database is older than this program."""

    def __init__(self, message: str, *, current: str | None, head: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.current = current
        self.head = head


class SchemaAheadError(ManifestError):
    """The database was written by a newer program."""

    def __init__(self, message: str, *, current: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.current = current


class ManifestConflictError(ManifestError):
    """Two writers raced on one row and this one lost."""


class DocumentError(CachectlError):
    """A stored document is malformed, or of a version this program does not know."""


class BuildError(CachectlError):
    """An entry could not be built or did not pass its gates; the message carries the upstream text.

    `refused` says that a gate refused it: the same code in the same environment is refused again.
    """

    exit_code = 1
    refused = False

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        returncode: int | None = None,
        log_path: Path | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.key = key
        self.returncode = returncode
        self.log_path = log_path
