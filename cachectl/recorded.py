"""What `exec --record` runs beside and after CMD, in a process of its own: `python -m cachectl.recorded WHAT ...`.

Owns the entry of two short processes. `prepare RECIPE FOLDER` says what may be recorded, while CMD starts; `publish
RECIPE FOLDER STORE SECONDS` proves and publishes the drafts when CMD has ended, and leaves `report.json` in the folder.
exec itself stays with the standard library: whatever is heavy, hangs or fails is here, where exec can stop it. Prints
nothing: stdout is CMD's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cachectl.build.job import write_json
from cachectl.errors import CachectlError
from cachectl.services.record import prepare_record, publish_drafts
from cachectl.store.layout import StoreLayout

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run one of the two; return 0, or 3 where the folder or the store can't be used at all."""
    what, recipe, folder, *rest = arguments
    try:
        if what == "prepare":
            prepare_record(Path(recipe), Path(folder))
            return 0
        store, seconds = rest
        report = publish_drafts(
            StoreLayout.resolve(store or None), Path(recipe), Path(folder), timeout_s=float(seconds)
        )
        write_json(Path(folder) / "report.json", report.model_dump(mode="json"))
    except (OSError, CachectlError) as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
