"""Root hands out for a pod that runs as somebody else, on folders as Kubernetes makes them; real processes of both."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.boot.hook_stores import handouts, uid_of_nobody
from tests.boot.test_hook_faults import AS_UID
from tests.stores import Hooked, MadeStore, tree

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to hand out for others")

# A container's random uid: no passwd entry, no HOME.
UID = uid_of_nobody()
GROUP = 1002700001
# Kubernetes gives a pod's fsGroup to its init containers, too.
AS_ROOT = f"""
import os, sys
from cachectl.boot import hook
os.setgroups([{GROUP}])
sys.exit(hook.main(sys.argv[2:]))
"""
# The program's process: the interpreter may lie where that user can't look, so all is imported before.
PROGRAM = """
import os, sys
from pathlib import Path
from cachectl.boot.handout import Handout
from cachectl.boot.watch import StartWatch
from cachectl.boot.claims import sweep
from cachectl.boot.warmdir import WarmDir, choose_warm_dir, remove_tree
from cachectl.schemas.canonical import digest_bytes
uid, groups = int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",") if word]
os.setgroups(groups)
os.setgid(0)
os.setuid(uid)
handout = Handout.read(Path(os.environ["CACHECTL_HANDOUT"]))
watch = StartWatch(handout)
assert watch.against is None and not watch.problems, (watch.against, watch.problems)
for item in handout.entries:
    watch.begin(item)
    for file in item.entry.files:
        path = item.path / file.path
        assert digest_bytes(path.read_bytes()) == file.digest, path
        found = path.stat()
        assert (found.st_uid, found.st_mode & 0o777) == (uid, file.mode), path
        path.write_bytes(b"mine")
    watch.success(item)
own = choose_warm_dir(None, os.environ)
assert isinstance(own, WarmDir), own
own.new_cold()
watch.end()
print(own.root)
"""


@pytest.fixture
def volume(open_made: MadeStore) -> Path:
    """A volume's mount, as an emptyDir: root's, and open to all."""
    folder = open_made.folder / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.fixture
def pod(open_made: MadeStore) -> MadeStore:
    """A store that only root may read."""
    open_made.layout.root.chmod(0o700)
    return open_made


def hook(made: MadeStore, warm_dir: Path | None, *arguments: str | Path, **environ: str | None) -> Hooked:
    """Run the hook as an init container would: as root, without HOME, in /."""
    place = str(warm_dir) if warm_dir is not None else None
    environ = {"CACHECTL_WARM_DIR": place, "HOME": None, **environ}
    return made.hook("--uid", str(UID), *arguments, program=("-c", AS_ROOT), cwd=Path("/"), environ=environ)


def start(made: MadeStore, hooked: Hooked, warm_dir: Path | None, groups: str = "") -> Path:
    """Start the program's process as its user; return the warm dir that it chose by itself."""
    environ = {"CACHECTL_WARM_DIR": str(warm_dir) if warm_dir is not None else None, "HOME": None}
    environ["CACHECTL_HANDOUT"] = hooked.report["env"]["CACHECTL_HANDOUT"]
    command = [sys.executable, "-c", PROGRAM, str(UID), groups]
    done = subprocess.run(
        command, cwd="/", env=made.hook_environ(environ), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def private(root: Path) -> bool:
    """Say whether everything in a warm dir is its user's alone."""
    found = [path.lstat() for path in [root, *root.rglob("*")]]
    return {UID} == {item.st_uid for item in found} and not any(item.st_mode & 0o077 for item in found)


@pytest.mark.parametrize(
    ("mode", "group"),
    [(0o777, 0), (0o1777, 0), (0o2777, GROUP), (0o2775, GROUP), (0o2770, GROUP), (0o755, 0)],
    ids=["emptyDir", "sticky", "setgid", "fsGroup", "fsGroup closed", "root's"],
)
def test_hook_for_another_uid_is_warm_in_its_process(pod: MadeStore, volume: Path, mode: int, group: int) -> None:
    """A private folder of the user's is made on the mount, and the mount stays as it is (field reports P2, P4, P5)."""
    os.chown(volume, 0, group)
    volume.chmod(mode)

    hooked = hook(pod, volume, CACHECTL_NODE_COPY="always")

    assert ("warm", []) == (hooked.outcome, hooked.against)
    own = volume / f"cachectl-{UID}"
    assert own == start(pod, hooked, volume, str(GROUP))
    assert private(own)
    assert (0, mode) == (volume.stat().st_uid, stat.S_IMODE(volume.stat().st_mode))
    # Two modules and the kernel that they share.
    assert 3 == len(list((own / "node" / "blobs").glob("*/*")))


def test_hook_for_another_uid_again_and_again(pod: MadeStore, volume: Path) -> None:
    """What the program left is swept as its user: the node copy, the hand-outs and the deaths are one user's."""
    for _ in range(2):
        hooked = hook(pod, volume, CACHECTL_NODE_COPY="always")
        start(pod, hooked, volume)
    (volume / f"cachectl-{UID}" / ".swept").unlink()

    assert "warm" == hook(pod, volume).outcome
    assert private(volume / f"cachectl-{UID}")


def test_hook_for_another_uid_folder_that_is_missing_is_made(pod: MadeStore, volume: Path) -> None:
    """With all that is missing above it, each the user's."""
    hooked = hook(pod, volume / "a" / "b c")

    assert "warm" == hooked.outcome
    assert volume / "a" / "b c" == start(pod, hooked, volume / "a" / "b c")
    assert private(volume / "a")


def test_hook_for_another_uid_default_folder(pod: MadeStore) -> None:
    """Root's own HOME and XDG folders are nothing to another user."""
    folder = Path(f"/var/tmp/cachectl-{UID}")
    try:
        hooked = hook(pod, None, HOME="/root", XDG_CACHE_HOME="/root/.cache")

        assert folder == start(pod, hooked, None)
        assert private(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_hook_for_another_uid_closed_parent_cold(pod: MadeStore) -> None:
    """A folder that the user can't reach is of no use, though root can make it."""
    closed = pod.folder / "closed"
    closed.mkdir(mode=0o700)

    hooked = hook(pod, closed / "warm")

    assert ("cold", [("store", "warm dir", "policy")]) == (hooked.outcome, hooked.against)


def test_hook_for_another_uid_folder_of_a_third_cold(pod: MadeStore, volume: Path) -> None:
    """Its owner could put another one in its place."""
    os.chown(volume, 4321, 4321)

    hooked = hook(pod, volume)

    assert ("cold", [("store", "warm dir", "policy")]) == (hooked.outcome, hooked.against)
    assert [] == list(volume.iterdir())


PLACES = ["", "handouts", "node", "node/blobs", "node/locks", "starts", "starts/open", "starts/lock", ".swept"]


@pytest.mark.parametrize("place", [*PLACES, "cachectl.env", "cold"])
def test_hook_for_another_uid_planted_links_lead_nowhere(pod: MadeStore, volume: Path, place: str) -> None:
    """Whatever links the user left in its folder: nothing of root's changes hands or content (field report P9)."""
    victim = pod.folder / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").write_text("root's")
    (victim / "file").chmod(0o600)
    before = tree(victim)
    own = volume / f"cachectl-{UID}"
    path = own / place if place else own
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim / "file" if place in ("starts/lock", ".swept", "cachectl.env") else victim)
    for made in [own, *(own.rglob("*") if place else ())]:
        os.chown(made, UID, UID, follow_symlinks=False)

    hooked = hook(pod, volume, CACHECTL_NODE_COPY="always")

    assert hooked.returncode == 0
    assert before == tree(victim)
    assert ("cold" if place in ("", "handouts") else "warm") == hooked.outcome


def test_hook_for_another_uid_link_above_is_not_followed(pod: MadeStore, volume: Path) -> None:
    """A step of the path that the user planted where it may write; root's own links are as good as folders."""
    (pod.folder / "victim").mkdir()
    (volume / "planted").symlink_to(pod.folder / "victim")
    os.chown(volume / "planted", UID, UID, follow_symlinks=False)
    (pod.folder / "roots").symlink_to(volume)

    outcomes = [hook(pod, volume / "planted" / "warm").outcome, hook(pod, pod.folder / "roots" / "warm").outcome]

    assert ["cold", "warm"] == outcomes
    assert [] == list((pod.folder / "victim").iterdir())


SWAPPER = """
import os, sys
uid, root, victim = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
print("ready", flush=True)
while True:
    for name in os.listdir(root):
        path = f"{root}/{name}"
        try:
            os.rename(path, f"{root}/.swapped")
            os.symlink(victim, path)
            os.unlink(path)
            os.rename(f"{root}/.swapped", path)
        except OSError:
            pass
"""


def test_hook_for_another_uid_folders_swapped_meanwhile_lead_nowhere(pod: MadeStore, volume: Path) -> None:
    """However the user's own processes move things about while root lays down."""
    victim = pod.folder / "victim"
    (victim / "deep").mkdir(parents=True)
    victim.chmod(0o755)
    (victim / "deep" / "file").write_text("root's")
    before = tree(victim)
    hook(pod, volume)
    command = [sys.executable, "-c", SWAPPER, str(UID), str(volume / f"cachectl-{UID}"), str(victim)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        codes = {hook(pod, volume, CACHECTL_NODE_COPY="always").returncode for _ in range(6)}
    finally:
        process.kill()
        process.communicate()

    assert {0} == codes
    assert before == tree(victim)


@pytest.mark.parametrize("uid", ["-1", str(2**32 - 1), str(2**40), "nobody", ""])
def test_hook_for_a_uid_that_is_none_cold(made: MadeStore, uid: str) -> None:
    """The number that means "leave it as it is" to the kernel is nobody's."""
    hooked = made.hook(f"--uid={uid}")

    assert ("cold", 0) == (hooked.outcome, hooked.returncode)
    assert [] == handouts(made.warm_dir)


def test_hook_for_another_uid_not_as_root_cold(open_made: MadeStore, volume: Path) -> None:
    """Said in words, and nothing is made."""
    hooked = open_made.hook(
        "--uid", "0", "--warm-dir", volume, program=("-c", AS_UID), environ={"TEST_UID": str(UID), "HOME": None}
    )

    assert ("cold", [("policy", "uid", "policy")]) == (hooked.outcome, hooked.against)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
@pytest.mark.parametrize(
    ("lacking", "mode", "warm"), [("setuid", 0o777, False), ("chown", 0o777, True), ("chown", 0o755, False)]
)
def test_hook_for_another_uid_without_a_capability(
    pod: MadeStore, volume: Path, lacking: str, mode: int, warm: bool
) -> None:
    """An init container whose capabilities are dropped does what it may, and says what it may not."""
    volume.chmod(mode)
    python = ("setpriv", f"--bounding-set=-{lacking}", f"--inh-caps=-{lacking}", sys.executable)

    hooked = pod.hook("--uid", str(UID), "--warm-dir", volume, python=python)

    assert ("warm" if warm else "cold") == hooked.outcome
    assert warm or "not permitted" in hooked.report["reasons"][0]["stored"]


@pytest.mark.parametrize(("mode", "warm"), [(0o777, True), (0o1777, True), (0o755, False)])
def test_hook_as_the_user_on_roots_mount(open_made: MadeStore, volume: Path, mode: int, warm: bool) -> None:
    """Without an init container of root's: the pod's own user finds a place on an emptyDir, too."""
    volume.chmod(mode)

    hooked = open_made.hook(
        "--warm-dir", volume, program=("-c", AS_UID), environ={"TEST_UID": str(UID), "HOME": None}, cwd=Path("/")
    )

    assert ("warm" if warm else "cold") == hooked.outcome
    own = volume / f"cachectl-{UID}"
    assert own.exists() is warm
    assert not warm or private(own)
