"""Field types and the strict base that all pydantic documents share.

Owns nothing of what a document says. Strict: text is no number and a number no boolean, in every document; lists are
kept as tuples, so that a frozen document stays as it was read.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from cachectl.schemas.canonical import is_digest

__all__ = ["Digest", "Document", "Many"]

_T = TypeVar("_T")


def _tuple_of_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_digest(value: str) -> str:
    if not is_digest(value):
        raise ValueError(f"{value!r} is no digest")
    return value


Many = Annotated[tuple[_T, ...], BeforeValidator(_tuple_of_list)]
Digest = Annotated[str, AfterValidator(_check_digest)]


class Document(BaseModel):
    """Base of every document and section: no unknown field, no change after reading, no coercion, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
