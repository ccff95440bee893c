"""Hypothesis strategies of the documents; what a new document may hold is added here."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cachectl.schemas.boot import Absence, BootRecord, Member, WarmSet
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.envelope import Envelope, Signature
from cachectl.schemas.keying import KEY_PARTS, KEY_VERSION, compute_key

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
WORDS = TEXTS.filter(bool)
NAMES = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,11}", fullmatch=True)
RANKS = st.integers(0, 127)
DIGESTS = st.binary(max_size=8).map(digest_bytes)
TIMES = st.datetimes().map(lambda moment: moment.isoformat(timespec="seconds") + "Z")

# What a JSON file can hold and read back to an equal value.
JSON_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON_VALUES = st.recursive(
    JSON_SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)
JSON_OBJECTS = st.dictionaries(TEXTS, JSON_VALUES, max_size=4)

# What canonical JSON can say beyond that: tuples, sets of scalars, the floats that JSON lacks.
CANONICAL_VALUES = st.recursive(
    JSON_SCALARS | st.floats() | st.frozensets(TEXTS | st.integers() | st.booleans(), max_size=4),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)

KEY_PART_DOCUMENTS = st.fixed_dictionaries(
    {name: st.dictionaries(TEXTS, CANONICAL_VALUES, max_size=3) for name in KEY_PARTS}
)

ENVELOPES = st.builds(
    Envelope,
    payload_type=TEXTS,
    payload=st.binary(max_size=64),
    signatures=st.lists(st.builds(Signature, keyid=TEXTS, sig=st.binary(max_size=64)), max_size=3).map(tuple),
)

MEMBERS = st.builds(Member, key=DIGESTS, manifest=DIGESTS, method=WORDS, case=WORDS, rank=RANKS)
WARM_SETS = st.builds(
    WarmSet,
    warm_set=DIGESTS,
    created_at=TIMES,
    request=JSON_OBJECTS,
    members=st.lists(MEMBERS, max_size=3).map(tuple),
    absent=st.lists(st.builds(Absence, method=WORDS, case=WORDS, rank=RANKS), max_size=2).map(tuple),
    ranks_per_node=st.none() | st.integers(1, 16),
)
BOOT_RECORDS = st.builds(
    BootRecord,
    recipe=NAMES,
    recipe_digest=DIGESTS,
    sequence=st.integers(0, 2**53),
    created_at=TIMES,
    paths=st.lists(WORDS, max_size=3).map(tuple),
    sets=st.lists(WARM_SETS, max_size=3).map(tuple),
)


@st.composite
def entry_documents(draw: st.DrawFn) -> dict[str, Any]:
    """Entry manifests' payloads, the parts as identity makes them: sets and non-finite floats included."""
    parts = draw(KEY_PART_DOCUMENTS)
    paths = draw(st.lists(st.from_regex(r"[a-z]{1,4}(/[a-z_]{1,4}){0,2}", fullmatch=True), min_size=1, max_size=3))
    # A file's name gets an ending that no folder has, so that no file lies below another.
    files = [
        {
            "path": f"{path}.{number}",
            "digest": draw(DIGESTS),
            "size_bytes": draw(st.integers(0, 2**40)),
            "mode": draw(st.sampled_from(("0600", "0700"))),
        }
        for number, path in enumerate(paths)
    ]
    return {
        "schema": "cachectl/entry/v1",
        "key_version": KEY_VERSION,
        "key": compute_key(parts),
        "recipe": draw(NAMES),
        "method": draw(st.sampled_from(("main_decode", "mtp_decode"))),
        "case": draw(NAMES),
        "rank": draw(RANKS),
        "parts": parts,
        "raw_sources": draw(st.dictionaries(TEXTS, DIGESTS, max_size=2)),
        "artifact": {
            "runtime": draw(st.sampled_from(("npugraph_ex", "torchair_ge"))),
            "format_version": draw(st.sampled_from(("1.0.5", "1.0.6"))),
            "runtime_path": "Model_static_aclgraphcache_0123/main_decode",
            "files": files,
        },
        "evidence": {
            "kind": draw(st.sampled_from(("simulated", "device"))),
            "soc": "Ascend910B1",
            "cann": "8.5.0",
            "torch_npu": "2.13.0",
        },
        "provenance": {
            "created_at": draw(TIMES),
            "builder": "cachectl 0.1.0",
            "cold_seconds": draw(st.none() | st.floats(0, 1e6)),
            "warm_seconds": draw(st.none() | st.floats(0, 1e6)),
            "gates": draw(JSON_OBJECTS),
            "warnings": draw(st.lists(TEXTS, max_size=2)),
        },
    }
