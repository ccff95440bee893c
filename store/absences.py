"""Which ranks were found to have no method of which case: what no entry can say, and a set is whole without.

Owns boot/absent/. A build of all ranks knows it when it ends; builds that share a world or a matrix between them tell
each other here. Each absence stands on the code that the rank had imported: with other code the rank may have the
method. Changed under a lock, replaced atomically.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from cachectl.errors import DocumentError
from cachectl.schemas.boot import Absence
from cachectl.schemas.canonical import canonical_bytes, digest_of
from cachectl.store.blobs import write_atomically
from cachectl.store.layout import StoreLayout, bare_hex, describe_os_error, read_bounded
from cachectl.store.locks import file_lock

__all__ = ["Files", "note_absences", "read_absences"]

# Digests of source files, by root and place below it.
Files = Mapping[str, str]

# Of version 1 nobody knows on which code it stands: it is as if nothing were noted.
_SCHEMA = "cachectl/absences/v2"
_OLDER = "cachectl/absences/v1"
_LOCK_TIMEOUT_S = 30.0
_LIMIT_BYTES = 16 << 20
# As many requests of a recipe as a boot record keeps sets.
_REQUESTS_KEPT = 16


def read_absences(layout: StoreLayout, recipe_digest: str, request_digest: str) -> dict[Absence, Files] | None:
    """Return what was found for one request of a recipe, each with digests of the source files that it stands on.

    Returns:
        None where nothing was noted.

    Raises:
        DocumentError: malformed.
        StoreError: not readable.
    """
    return _read(layout, recipe_digest).get(request_digest)


def note_absences(
    layout: StoreLayout,
    recipe_digest: str,
    request_digest: str,
    *,
    looked_at: Collection[Absence],
    absent: Mapping[Absence, Files],
) -> None:
    """Note what a build found. Idempotent, safe beside other builds of the same recipe.

    Args:
        looked_at: the lines that were built or found absent; what was noted of them before is forgotten.
        absent: those of them that are absent, each with digests of the source files that it stands on.

    Raises:
        StoreError: a lock or the file can't be had.
    """
    with file_lock(layout, f"absent-{bare_hex(recipe_digest)}", _LOCK_TIMEOUT_S):
        try:
            noted = _read(layout, recipe_digest)
        except DocumentError:
            noted = {}  # A note is made anew by each build.
        before = noted.pop(request_digest, None) or {}
        after = {place: files for place, files in before.items() if place not in looked_at} | {**absent}
        if after == before:
            return
        kept = dict(list(noted.items())[-_REQUESTS_KEPT + 1 :])
        files = {digest_of(found): found for places in (*kept.values(), after) for found in places.values()}
        requests = [
            {
                "request": digest,
                "absent": [{**vars(place), "files": digest_of(found[place])} for place in sorted(found, key=_order)],
            }
            for digest, found in {**kept, request_digest: after}.items()
        ]
        document = {"schema": _SCHEMA, "requests": requests, "files": files}
        write_atomically(layout, layout.absences(recipe_digest), canonical_bytes(document))


def _read(layout: StoreLayout, recipe_digest: str) -> dict[str, dict[Absence, Files]]:
    path = layout.absences(recipe_digest)
    try:
        document = json.loads(read_bounded(path, _LIMIT_BYTES))
        if document["schema"] == _OLDER:
            return {}
        if document["schema"] != _SCHEMA:
            raise DocumentError(f"{path} has schema {document['schema']!r}, this program reads {_SCHEMA!r}")
        files = {
            name: {str(place): str(digest) for place, digest in found.items()}
            for name, found in document["files"].items()
        }
        return {
            str(item["request"]): {
                Absence(str(found["method"]), str(found["case"]), int(found["rank"])): files[found["files"]]
                for found in item["absent"]
            }
            for item in document["requests"]
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise describe_os_error(error, f"can't read {path}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DocumentError(f"{path} is malformed: {type(error).__name__}: {error}") from error


def _order(absence: Absence) -> tuple[int, str, str]:
    return absence.rank, absence.method, absence.case
