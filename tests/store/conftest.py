"""Fixtures of the store's tests: databases of both kinds."""

from __future__ import annotations

from tests.postgres import database, postgres_url

__all__ = ["database", "postgres_url"]
