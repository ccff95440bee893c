"""What a node's labels say of its NPU and driver, for what runs where no NPU is attached, as in an init container.

Owns the file's form and which labels count; what a SoC's name has to look like is identity/device.py's. Standard
library only.

Facts: a downward API volume writes `metadata.labels` as lines `key="value"`, the value quoted as Go quotes (kubernetes,
pkg/fieldpath). Those are the pod's labels: a node's have to be copied to it, or to be asked for by the pod's own node
selector (docs/kubernetes.md). MindCluster's device plugin labels a node with `node.kubernetes.io/npu.chip.name`
(910B3, 310P3, Ascend910) and `huawei.com/driver.version`, newer ones with `huawei.com/npu.chip.name` and
`huawei.com/npu.driver.version`; `accelerator` is a family there (huawei-Ascend910), `accelerator-type` a server
(module-910b-8).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from cachectl.store.layout import read_bounded

__all__ = ["LABELS_VARIABLE", "SOC_LABELS", "labelled_driver", "only", "read_labels"]

LABELS_VARIABLE = "CACHECTL_NODE_LABELS"
DEFAULT_LABELS = "/etc/podinfo/labels"
# Exact names first; the last two name a SoC only where a cluster's own tools write them so.
SOC_LABELS = ("huawei.com/npu.chip.name", "node.kubernetes.io/npu.chip.name", "accelerator-type", "accelerator")
DRIVER_LABELS = ("huawei.com/npu.driver.version", "huawei.com/driver.version")

# A pod's labels are 63 characters each; its annotations, which may be mounted instead, 256 KiB together.
_LIMIT_BYTES = 1 << 20


def read_labels(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in the downward API's file; none where there is no such file or it can't be read.

    Args:
        environ: CACHECTL_NODE_LABELS names the file, else it is /etc/podinfo/labels.
    """
    try:
        raw = read_bounded(Path(environ.get(LABELS_VARIABLE) or DEFAULT_LABELS), _LIMIT_BYTES, follow=True)
    except OSError:
        return {}
    labels = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        key, equals, quoted = line.strip().partition("=")
        try:
            value = json.loads(quoted) if equals else None
        except (ValueError, RecursionError):
            continue  # Go's \x and \a are not JSON's; no label that counts has them.
        if isinstance(value, str):
            labels[key] = value
    return labels


def labelled_driver(labels: Mapping[str, str]) -> str | None:
    """Return the driver's version that the labels name; None where they name none, or two."""
    return only(labels[name].strip() for name in DRIVER_LABELS if name in labels)


def only(values: Iterable[str]) -> str | None:
    """Return the one value that is said, however often; None where nothing is, or two different ones are."""
    found = {value for value in values if value}
    return found.pop() if len(found) == 1 else None
