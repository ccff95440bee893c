"""Runs a manifest's pod on this machine, as near as that comes without a cluster.

Each container is a real process in a mount namespace and a root of its own: this machine's programs as the image, the
pod's volumes mounted where the manifest says, read-only where it says so; uid, gid and groups of the security context,
no capabilities; and no environment but the image's, the manifest's and what a controller injects. An emptyDir is a
tmpfs as kubelet makes it: 0777, and with fsGroup that group and the setgid bit. Needs root.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SYSTEM = ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr", "var")
_NO_NEW_PRIVS, _DROP_FROM_BOUNDING_SET = 38, 24  # prctl(2)
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "SETGID": 6, "SETUID": 7}  # capabilities(7)
_LAST_CAPABILITY = 40


@dataclass(frozen=True)
class Image:
    """What a container's image holds: a folder at /workspace, paths of this machine, and its ENV."""

    workspace: Path
    environ: Mapping[str, str]
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a container ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Pod:
    """A pod template with its volumes in place."""

    template: Mapping[str, Any]
    image: Image
    volumes: Mapping[str, Path]
    # Removed with the pod: containers' roots are put in it.
    base: Path
    injected: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.template["spec"]
        return found

    def run(self, container: Mapping[str, Any], *, timeout_s: float = 600.0, **security: Any) -> Ended:
        """Run one container to its end; `security` changes its security context."""
        context = {**self.spec.get("securityContext", {}), **container.get("securityContext", {}), **security}
        plan = {
            "root": tempfile.mkdtemp(prefix="root.", dir=self.base),
            "paths": [str(path) for path in _needed(self.image)],
            "workspace": str(self.image.workspace),
            "mounts": [
                [str(self.volumes[mount["name"]]), mount["mountPath"], mount.get("readOnly", False)]
                for mount in container.get("volumeMounts", [])
            ],
            "read_only": context.get("readOnlyRootFilesystem", False),
            "uid": context.get("runAsUser", 0),
            "gid": context.get("runAsGroup", 0),
            "groups": [context["fsGroup"]] if "fsGroup" in context else [],
            "confined": context.get("allowPrivilegeEscalation") is False,
            "capabilities": _kept(context.get("capabilities", {})),
            "cwd": container.get("workingDir", "/"),
            "command": [*container["command"], *container.get("args", [])],
        }
        environ = {
            # What containerd sets for a uid without a passwd entry; the manifest may say otherwise.
            "HOME": "/",
            **self.image.environ,
            **self.injected,
            **{variable["name"]: variable["value"] for variable in container.get("env", [])},
        }
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", sys.executable, "-I", __file__, json.dumps(plan)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def run_to_end(self) -> list[Ended]:
        """Run the init containers one after the other, then the containers; ends with the first that fails."""
        ended = []
        for container in (*self.spec.get("initContainers", []), *self.spec["containers"]):
            ended.append(self.run(container))
            if ended[-1].returncode:
                break
        return ended


def programs(workspace: Path, **scripts: str) -> None:
    """Put programs into a workspace's bin: ours, this interpreter, and what else is named."""
    binaries = workspace / "bin"
    binaries.mkdir(exist_ok=True)
    scripts = {
        "cachectl": f'#!/bin/sh\nexec {sys.executable} -m cachectl "$@"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        **scripts,
    }
    for name, text in scripts.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)


@contextmanager
def pod_of(
    template: Mapping[str, Any], image: Image, claims: Mapping[str, Path], injected: Mapping[str, str] | None = None
) -> Iterator[Pod]:
    """Lay out a pod's volumes for as long as the context lasts: emptyDirs, the downward API's file, the claims."""
    base = Path(tempfile.mkdtemp(prefix="cachectl-pod."))
    mounted: list[Path] = []
    group = template["spec"].get("securityContext", {}).get("fsGroup")
    try:
        volumes = {}
        for volume in template["spec"].get("volumes", []):
            place = base / volume["name"]
            place.mkdir()
            if "emptyDir" in volume:
                options = "mode=0777" if group is None else f"mode=2777,gid={group}"
                subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
                mounted.append(place)
            elif "downwardAPI" in volume:
                for item in volume["downwardAPI"]["items"]:
                    assert item["fieldRef"]["fieldPath"] == "metadata.labels"
                    labels = template["metadata"]["labels"]
                    # As kubelet does: a folder of links, so that all its files change at once.
                    (place / "..data").mkdir(exist_ok=True)
                    (place / "..data" / item["path"]).write_text(
                        "".join(f"{key}={json.dumps(value)}\n" for key, value in sorted(labels.items()))
                    )
                    (place / item["path"]).symlink_to(Path("..data") / item["path"])
            else:
                place = claims[volume["persistentVolumeClaim"]["claimName"]]
            volumes[volume["name"]] = place
        yield Pod(template, image, volumes, base, injected or {})
    finally:
        for place in mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(base)


def _kept(capabilities: Mapping[str, Sequence[str]]) -> list[int] | None:
    """Return the numbers of the capabilities that are left; None where all are."""
    if not capabilities:
        return None
    assert capabilities["drop"] == ["ALL"]
    return [_CAPABILITIES[name] for name in capabilities.get("add", [])]


def _needed(image: Image) -> list[Path]:
    """Return the places of this machine that the interpreter and this package are in."""
    import cachectl

    package = Path(cachectl.__file__).resolve().parent
    # From the checkout the package's folders are links beside it; an installed one is below sys.prefix.
    places = [Path(sys.prefix), Path(sys.base_prefix), package.parent, *image.paths]
    return [place for place in dict.fromkeys(places) if not any(other in place.parents for other in places)]


# In the new mount namespace, as root


def _mount(*words: str) -> None:
    subprocess.run(["/bin/mount", *words], check=True, env={})


def _bind(source: str, root: str, place: str, *, read_only: bool = False, deep: bool = False) -> None:
    target = root + place
    os.makedirs(target, exist_ok=True)
    _mount("--rbind" if deep else "--bind", source, target)
    if read_only:
        _mount("-o", "remount,bind,ro", target)


def _build_root(plan: Mapping[str, Any]) -> str:
    root: str = plan["root"]
    _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", root)
    for name in SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            kernel = name in ("dev", "proc", "sys", "run")
            _bind(f"/{name}", root, f"/{name}", read_only=plan["read_only"] and not kernel, deep=True)
    # An image knows root; the pod's uid has no entry (field report P4).
    with open(f"{root}/.passwd", "w") as file:
        file.write("root:x:0:0:root:/root:/bin/sh\n")
    _mount("--bind", f"{root}/.passwd", f"{root}/etc/passwd")
    os.mkdir(f"{root}/tmp")
    os.chmod(f"{root}/tmp", 0o1777)
    _bind(plan["workspace"], root, "/workspace", read_only=plan["read_only"])
    for source, place, read_only in plan["mounts"]:
        _bind(source, root, place, read_only=read_only)
    for place in plan["paths"]:
        _bind(place, root, place, read_only=True)
    if plan["read_only"]:
        _mount("-o", "remount,ro", root)
    return root


def _control(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _become(plan: Mapping[str, Any]) -> None:
    root = _build_root(plan)
    os.chroot(root)
    os.chdir(plan["cwd"])
    os.umask(0o022)
    for number in range(_LAST_CAPABILITY + 1):
        # Out of the bounding set: what root executes, too, has the ones that are left and no others.
        if plan["capabilities"] is not None and number not in plan["capabilities"]:
            _control(_DROP_FROM_BOUNDING_SET, number)
    os.setgroups(plan["groups"])
    os.setgid(plan["gid"])
    os.setuid(plan["uid"])
    if plan["confined"]:
        _control(_NO_NEW_PRIVS, 1)
    command: Sequence[str] = plan["command"]
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(json.loads(sys.argv[1]))
