"""The boot hook: from a recipe's bytes to a private warm copy, or to the reasons for a cold start.

Owns the order of the checks: boot record by the recipe's raw bytes, toolchain and device of this machine, source files,
observed environment, then digests of the bytes that are written. The warm sets that still fit are handed out, up to
four, those of this start's cut into nodes first and then the newest; one that is damaged stands not in the way of an
older one that is whole. Standard library only. It never writes to the store, never raises into a boot, waits for nobody
and looks at its deadline between two files and within one; what is ours and unforeseen is caught whole here, because a
pod must not die of its cache.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cachectl.boot.acting import may_act_as
from cachectl.boot.bounded import NoAnswerError, in_child, own_deadline
from cachectl.boot.candidates import (
    Candidate,
    candidate_sets,
    compare_set,
    declared_request,
    find_record,
    refuse_late,
)
from cachectl.boot.env_file import env_file_of, shell_lines, write_env_file
from cachectl.boot.handing import NoWarmDirError, UnfinishedHandout
from cachectl.boot.handout import Handout, HookSeconds
from cachectl.boot.materialize import DeadlineError, NoRoomError
from cachectl.boot.options import DEFAULT_DEADLINE_S, HookOptions, parse_arguments
from cachectl.boot.starts import QuarantinedError
from cachectl.errors import (
    ArtifactCorruptedError,
    ArtifactNotFoundError,
    CachectlError,
    ConfigError,
    DocumentError,
    StoreReadOnlyError,
)
from cachectl.identity.ranks import find_ranks
from cachectl.identity.request import source_roots
from cachectl.schemas.boot import Reason, WarmSet
from cachectl.store.layout import StoreLayout
from cachectl.values import replace

__all__ = [
    "DEFAULT_DEADLINE_S",
    "HookOptions",
    "declared_request",
    "hook_in_time",
    "main",
    "parse_arguments",
    "run_hook",
]


def main(arguments: Sequence[str]) -> int:
    """Run `cachectl hook`; print the outcome and return the exit code: 0, or 1 under --strict when not warm."""
    if os.environ.get("CACHECTL_DISABLE") == "1":
        return _print(Handout("disabled", Path()), HookOptions(output=_asked_output(arguments)))
    options = parse_arguments(arguments)
    return _print(hook_in_time(options, os.environ, leave=_leave), options)


def hook_in_time(
    options: HookOptions,
    environ: Mapping[str, str],
    *,
    leave: Callable[[HookOptions, Mapping[str, str]], Handout] | None = None,
) -> Handout:
    """Return the hand-out for a recipe as its report; ends by the deadline whatever the store does. Never raises.

    For processes without threads: the work is done in a forked one, which is given up where a system call hangs.

    Args:
        options: as from the command line.
        environ: the environment the program will have.
        leave: what to do there; None for `run_hook`.
    """
    work = leave or run_hook
    own = replace(options, deadline_s=own_deadline(options.deadline_s))
    path = Path(options.recipe or "")
    try:
        path = Path(os.path.abspath(path))
    except OSError:
        pass  # The working folder is gone; the hook says so.
    try:
        report = in_child(lambda: work(own, environ).report(), options.deadline_s)
    except CachectlError as error:
        return Handout("cold", path, reasons=(_reason_of(error),))
    except OSError:
        # No process to be had, as at a container's pid limit: better unbounded than not at all.
        return work(options, environ)
    return Handout.of_report(report, path)


def _leave(options: HookOptions, environ: Mapping[str, str]) -> Handout:
    """Run the hook and leave its environment as a file; before anything else there is no old hand-out in it."""
    path: Path | None = None
    against: tuple[Reason, ...] = ()
    try:
        path = env_file_of(options, environ)
    except OSError:
        pass  # No working folder, and a relative path: no warm dir for the hook either.
    else:
        against = _left(path, {}, options.uid)
    if options.unknown:
        reason = Reason(
            "policy",
            "hook option",
            wanted=" ".join(options.unknown),
            kind="policy",
            hint="this version of cachectl does not know it: remove the option or upgrade cachectl",
        )
        handout = Handout("cold", Path(options.recipe or ""), reasons=(reason,))
    else:
        handout = run_hook(options, environ)
    if handout.env and not against:
        against = _left(path, handout.env, options.uid)
    return replace(handout, reasons=(*handout.reasons, *against))


def _left(path: Path | None, env: Mapping[str, str], uid: int | None) -> tuple[Reason, ...]:
    try:
        if path is not None:
            write_env_file(path, env, uid)
    except OSError as error:
        hint = "pass --env-file FILE in a folder that this user may write"
        return (Reason("policy", "env file", str(path), error.strerror, "policy", hint),)
    return ()


def run_hook(options: HookOptions, environ: Mapping[str, str] | None = None) -> Handout:
    """Return the hand-out for a recipe; never raises.

    Args:
        options: as from the command line.
        environ: the environment the program will have; None for this process's.
    """
    environ = os.environ if environ is None else environ
    started = time.perf_counter()
    recipe_path = Path(options.recipe or "")
    try:
        # Within the handlers: a working folder that is gone makes abspath raise.
        recipe_path = Path(os.path.abspath(recipe_path))
        handout = _hand_out(options, environ, recipe_path, started)
    except CachectlError as error:
        handout = Handout("cold", recipe_path, reasons=(_reason_of(error),))
    except Exception as error:  # noqa: BLE001 - the boot hook's broad handler, see the module's docstring
        reason = Reason(
            "store", "hook", f"{type(error).__name__}: {error}", kind="corrupt", hint="please report this fault"
        )
        handout = Handout("cold", recipe_path, reasons=(reason,))
    return replace(handout, seconds=replace(handout.seconds, total=time.perf_counter() - started))


def _asked_output(arguments: Sequence[str]) -> str:
    # With CACHECTL_DISABLE=1 no file is touched, but the caller still gets the format it asked for.
    return parse_arguments(arguments).output


def _hand_out(options: HookOptions, environ: Mapping[str, str], recipe_path: Path, started: float) -> Handout:
    cold = Handout("cold", recipe_path, python_path=environ.get("PYTHONPATH"))
    if options.recipe is None:
        return replace(cold, reasons=(Reason("policy", "recipe", kind="absent", hint="run: cachectl hook RECIPE"),))
    if options.uid is not None and not may_act_as(options.uid):
        hint = "run the hook as the program's user, or as root"
        return replace(cold, reasons=(Reason("policy", "uid", os.getuid(), options.uid, "policy", hint),))
    deadline_s = time.monotonic() + options.deadline_s
    layout = StoreLayout.resolve(options.store or environ.get("CACHECTL_STORE") or None)
    layout.check()
    told: list[Reason] = []
    record = find_record(layout, recipe_path, told)
    if isinstance(record, Reason):
        return replace(cold, reasons=(record,))
    roots = source_roots(recipe_path.parent, record.paths)
    here = find_ranks(environ, rank=options.rank)
    making = UnfinishedHandout(layout, options, environ, deadline_s)
    try:
        sets = candidate_sets(record, environ)
        against = _choose(sets, making, lambda item: compare_set(layout, item, here, roots, environ, deadline_s))
        resolved = HookSeconds(time.perf_counter() - started - making.spent_s)
        if making.sets:
            # Damage is told also where another set is whole: somebody has to mend it.
            return making.finish(replace(cold, roots=roots, reasons=(*told, *against), seconds=resolved))
    except BaseException:
        making.abandon()
        raise
    making.abandon()
    if not against:
        hint = f"run: cachectl build {recipe_path}"
        against = [Reason("store", "warm set", kind="absent", hint=hint)]
    return replace(cold, reasons=tuple(against), seconds=resolved)


def _choose(
    sets: Sequence[WarmSet], making: UnfinishedHandout, compare: Callable[[WarmSet], Candidate]
) -> list[Reason]:
    """Lay down the sets that fit, in their order; return what is damaged and, where none fits, what is against them.

    A set about which nothing is pending ends the list, and the last place is kept for one. Which device a rank gets
    can't be seen from here: a set that is tied to a cut into nodes ends the list of that cut only.

    Raises:
        CachectlError: no set could be laid down, and no other would fare better: out of time, or no warm dir.
    """
    reasons: tuple[Reason, ...] = ()
    damage: list[Reason] = []
    waiting: list[Candidate] = []
    cuts, ended = {item.ranks_per_node for item in sets}, set()
    # What is waiting is looked at last.
    items: Iterable[WarmSet | Candidate] = itertools.chain(sets, waiting)
    for item in items:
        warm_set = item.warm_set if isinstance(item, Candidate) else item
        if warm_set.ranks_per_node in ended:
            continue
        if not making.room:
            break
        try:
            refuse_late(making.deadline_s)
            candidate = item if isinstance(item, Candidate) else compare(item)
            if candidate.against:
                reasons = reasons or candidate.against
            elif candidate.pending and making.room == 1 and candidate is not item:
                waiting.append(candidate)
            else:
                making.add(candidate)
                if not candidate.pending:
                    ended.add(warm_set.ranks_per_node)
                if None in ended or ended == cuts:
                    break
        except (DeadlineError, NoWarmDirError) as error:
            if not making.sets:
                raise
            damage.append(_reason_of(error))
            break
        except CachectlError as error:
            damage.append(_reason_of(error))
            if isinstance(error, NoRoomError) and making.sets:
                break  # Each further one would fill the disk anew.
    return damage if making.sets else [*damage, *reasons]


def _reason_of(error: CachectlError) -> Reason:
    """Return the reason for a cold start that an error is."""
    if isinstance(error, (NoWarmDirError, QuarantinedError)):
        return error.reason
    hint = error.hint or ""
    if isinstance(error, ArtifactCorruptedError):
        return Reason("artifact", "digest", error.message, kind="corrupt", hint=hint)
    if isinstance(error, ArtifactNotFoundError):
        return Reason("artifact", "blob", error.message, kind="absent", hint=hint)
    if isinstance(error, ConfigError):
        return Reason("policy", "recipe", error.message, kind="policy", hint=hint)
    if isinstance(error, DeadlineError):
        return Reason("policy", "deadline", error.message, kind="policy", hint=hint)
    if isinstance(error, DocumentError):
        return Reason("store", "document", error.message, kind="corrupt", hint=hint or "run: cachectl verify")
    if isinstance(error, NoAnswerError):
        return Reason("store", "hook", error.message, kind="corrupt", hint=hint)
    if isinstance(error, StoreReadOnlyError):
        return Reason("store", "permission", error.message, kind="policy", hint=hint)
    return Reason("store", "store", error.message, kind="absent", hint=hint)


def _sayable(handout: Handout, options: HookOptions) -> Handout:
    """Return the hand-out, cold where the format asked for can't say its paths: half a line would be another name."""
    if options.output != "env" or not any("\n" in value for value in handout.env.values()):
        return handout
    hint = "a line NAME=value can't hold a line break: use --format shell, or paths without one"
    reason = Reason("policy", "format", None, "env", "policy", hint)
    return Handout("cold", handout.recipe_path, reasons=(*handout.reasons, reason), seconds=handout.seconds)


def _print(handout: Handout, options: HookOptions) -> int:
    handout = _sayable(handout, options)
    report = handout.report()
    if options.output == "json":
        text = json.dumps(report) + "\n"
    elif options.output == "shell":
        text = shell_lines(report["env"])
    else:
        text = "".join(f"{name}={value}\n" for name, value in report["env"].items())
    # JSON is ASCII whatever the locale; a path goes out as the bytes that it came in as.
    _write(1, os.fsencode(text))
    if not options.quiet:
        text = f"cachectl hook: {handout.outcome}\n"
        for reason in handout.reasons:
            text += f"  {reason}\n" + (f"    {reason.hint}\n" if reason.hint else "")
        _write(2, text.encode("utf-8", "backslashreplace"))
    # Disabled is 0: the switch that turns cachectl off must not keep pods from starting.
    return 1 if options.strict and handout.outcome not in ("warm", "disabled") else 0


def _write(descriptor: int, data: bytes) -> None:
    """Write past sys.stdout: no closed pipe or full disk behind it may end a boot."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # Nobody listens, and the outcome is the same.
