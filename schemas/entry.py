"""The entry manifest as the writing side makes it; `boot.StoredEntry` reads the same document without pydantic.

Owns the validation before writing: the key is that of the parts, and every file's path stays inside the artifact. The
manifest is immutable once enveloped; the digest of its envelope's bytes names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from cachectl.errors import DocumentError
from cachectl.schemas.boot import ENTRY_SCHEMA
from cachectl.schemas.canonical import canonical_bytes
from cachectl.schemas.envelope import ENTRY_PAYLOAD_TYPE, Envelope
from cachectl.schemas.fields import Digest, Document, Many
from cachectl.schemas.key import KeyParts
from cachectl.schemas.keying import READABLE_KEY_VERSIONS

__all__ = [
    "Artifact",
    "ArtifactFileModel",
    "Captures",
    "EntryManifest",
    "Evidence",
    "GoldenStep",
    "Provenance",
    "Shown",
    "WarmUp",
]


def _check_inner_path(value: str) -> str:
    # The same rule as boot's reading: what a boot would refuse must not be written.
    if "\\" in value or "\0" in value or any(step in ("", ".", "..") for step in value.split("/")):
        raise ValueError(f"{value!r} leaves the artifact's directory")
    return value


_InnerPath = Annotated[str, AfterValidator(_check_inner_path)]
_Text = Annotated[str, Field(min_length=1)]


class ArtifactFileModel(Document):
    """One file of the artifact; `mode` is the permission bits in octal, as text."""

    path: _InnerPath
    digest: Digest
    size_bytes: int = Field(ge=0)
    mode: str = Field(pattern=r"^0[0-7]{3}\z")


class Artifact(Document):
    """The file tree the runtime produced, and where below its cache directory the runtime looks for it."""

    runtime: _Text
    format_version: _Text
    runtime_path: _InnerPath
    files: Many[ArtifactFileModel] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_paths(self) -> Artifact:
        paths = {file.path for file in self.files}
        if len(paths) != len(self.files):
            raise ValueError("a path stands twice among the files")
        for path in paths:
            steps = path.split("/")
            for length in range(1, len(steps)):
                if "/".join(steps[:length]) in paths:
                    raise ValueError(f"{path!r} lies below another file")
        return self


class Evidence(Document):
    """Where the entry was shown to work. An unknown version is an error, not an empty text: "" would equal ""."""

    kind: Literal["simulated", "device"]
    soc: _Text
    cann: _Text
    torch_npu: _Text


class GoldenStep(Document):
    """One step of the warm-up calls: how its inputs were made, the digest of all it returned, and its leaves.

    `inputs` is `given` as the recipe's function returned them, `turned` with their values in another order, `again` as
    the function returned them when called once more, or `moved`, the given ones at other addresses.
    """

    step: int = Field(ge=0)
    inputs: Literal["given", "turned", "again", "moved"]
    digest: Digest
    values: Many[dict[str, Any]] = ()


class WarmUp(Document):
    """The calls that the gates made, so that a later process can make them again and compare.

    The first one's arguments are what the key's part `model` says: `inputs` called with `args`. `inputs_digest` is that
    of what it returned. `exact` says whether two processes gave the same outputs to the last bit; where they did not,
    rtol and atol decide. `inputs_repeat` says whether they gave the same inputs.
    """

    inputs_digest: Digest
    inputs_repeat: bool | None = None
    exact: bool | None = None
    rtol: float = Field(ge=0)
    atol: float = Field(ge=0)
    steps: Many[GoldenStep]


class Captures(Document):
    """Graph captures: what is to be expected of a process, and what the gates' steps came to.

    `limit` is capture_limit. `keys` is how many graph keys the entry's calls have: 0 where nothing is captured, None
    where each new value of `sizes` or `values` is another one. `written` are the graph's inputs that it writes: where
    one has moved, the same key is captured again. `captured`, `recaptured` and `fell_back` (graphs that are eager
    since) are of the gates' steps in a fresh process, None where this wheel can't be asked.
    """

    limit: int | None = None
    keys: int | None = None
    sizes: Many[str] = ()
    values: Many[str] = ()
    written: Many[str] = ()
    captured: int | None = None
    recaptured: int | None = None
    fell_back: int | None = None
    warning: str | None = None


class Shown(Document):
    """What the gates showed beyond equal values.

    `rungs` are the steps of the guide's ladder: eager, graph, accuracy, cache, static_kernels. `held` are the places of
    outputs and inputs that a later call overwrites. `seconds` are those of the cold and the warm first call, in parts.
    """

    rungs: dict[str, Literal["passed", "not asked", "none saved"]]
    warm_up: WarmUp
    held: dict[str, Many[str]]
    captures: Captures
    seconds: dict[str, dict[str, float]] = Field(default_factory=dict)


class Provenance(Document):
    """Who built the entry, when, how long it took and what the gates said; no part of the key.

    `cold_seconds` and `warm_seconds` are None where that side was not measured. `ranks_per_node` is the cut into nodes
    in which a world of several ranks was built, None where nodes were unequal. Earlier versions have no `shown` and no
    `ranks_per_node`.
    """

    created_at: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?Z\z")
    builder: _Text
    cold_seconds: float | None = Field(default=None, ge=0)
    warm_seconds: float | None = Field(default=None, ge=0)
    gates: dict[str, Any] = Field(default_factory=dict)
    warnings: Many[str] = ()
    shown: Shown | None = None
    ranks_per_node: int | None = Field(default=None, ge=1)

    @property
    def shown_document(self) -> dict[str, Any] | None:
        """`shown` as plain values."""
        return self.shown.model_dump() if self.shown is not None else None


class EntryManifest(Document):
    """An entry manifest's payload: the key parts whole, the files, the evidence and the provenance."""

    schema_version: Literal["cachectl/entry/v1"] = Field(default="cachectl/entry/v1", alias="schema")
    key_version: Literal[1, 2, 3] = 3
    key: Digest
    recipe: _Text
    method: _Text
    case: _Text
    rank: int = Field(ge=0)
    parts: KeyParts
    # Digests of whole source files, for a fast equal; beside the key, so that an edited comment keeps the key.
    raw_sources: dict[str, Any] = Field(default_factory=dict)
    artifact: Artifact
    evidence: Evidence
    provenance: Provenance

    @model_validator(mode="after")
    def _check_key(self) -> EntryManifest:
        computed = self.parts.key(self.key_version)
        if computed != self.key:
            raise ValueError(f"the key is {self.key}, its parts give {computed}")
        return self

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> EntryManifest:
        """Read a payload strictly.

        Raises:
            DocumentError: another schema or key version, a missing, mistyped or unknown field, or a key that is not
                that of the parts.
        """
        # A schema or version of another program comes first: its fields may all look wrong here.
        for name, readable in (("schema", (ENTRY_SCHEMA,)), ("key_version", READABLE_KEY_VERSIONS)):
            found = document.get(name)
            if type(found) is bool or found not in readable:
                *others, last = map(repr, readable)
                wanted = f"{', '.join(others)} and {last}" if others else last
                raise DocumentError(f"entry manifest has {name} {found!r}, this program reads {wanted}")
        try:
            return cls.model_validate(dict(document))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(step) for step in first["loc"])
            raise DocumentError(f"entry manifest is malformed: {place}: {first['msg']}") from error

    @classmethod
    def from_envelope(cls, envelope: Envelope) -> EntryManifest:
        """Read the payload of an envelope; raises DocumentError as `from_document` and `Envelope.document` do."""
        return cls.from_document(envelope.document(ENTRY_PAYLOAD_TYPE))

    def to_document(self) -> dict[str, Any]:
        """Return the payload as plain JSON values; sets in the parts become sorted lists."""
        document: dict[str, Any] = json.loads(self._payload())
        return document

    def envelope(self) -> Envelope:
        """Return the payload in an envelope without signatures."""
        return Envelope(ENTRY_PAYLOAD_TYPE, self._payload())

    def _payload(self) -> bytes:
        # pydantic's own JSON mode would write sets in the order of this process's hash seed.
        document = self.model_dump(by_alias=True)
        for name in ("shown", "ranks_per_node"):
            if document["provenance"][name] is None:
                # Manifests of earlier versions stay as they were, byte by byte.
                del document["provenance"][name]
        return canonical_bytes(document)
