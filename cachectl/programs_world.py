"""The process group of a script that runs in a rank process, which has joined one already.

Owns init_process_group and destroy_process_group while a script runs: the script makes its own default group, with its
own backend, over the store by which the ranks have met, and keeps it when it is unwound. torch must be imported.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cachectl.errors import ConfigError, EnvironmentFault
from cachectl.runtimes.rendezvous import rendezvous_store

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ScriptWorld"]

_HINT = "start the ranks with torchrun, or let cachectl build start them"


class ScriptWorld:
    """The world of one script, while it is entered.

    A script sees no default group until it makes one. One that makes none leaves the rank with a group as it was.
    """

    def __init__(self) -> None:
        self._distributed: Any = None
        self._store: Any = None
        self.rank, self.size = 0, 1
        self._backend: str | None = None
        self._replaced: list[tuple[Any, str, Any]] = []
        self._rounds = itertools.count()
        self._groups = itertools.count()
        # From then on the script's own clean-up leaves the group alone.
        self.unwinding = False

    def __enter__(self) -> Self:
        torch: Any = sys.modules["torch"]
        if not torch.distributed.is_available():
            return self
        self._distributed = distributed = torch.distributed
        core = sys.modules["torch.distributed.distributed_c10d"]
        if distributed.is_initialized():
            self._backend = distributed.get_backend()
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
            self._store = rendezvous_store(torch)
            if self._store is None:
                raise EnvironmentFault("the ranks have met over nothing that a script can use", hint=_HINT)
            # One that leaves while another still connects is a lost peer to it.
            self.all_agree(True)
            distributed.destroy_process_group()
        else:
            self._store = distributed.HashStore()
        stand_ins = {"init_process_group": self._init, "destroy_process_group": self._destroy}
        for name, stand_in in stand_ins.items():
            original = getattr(core, name)
            wrapped = _wrapped(original, stand_in)
            # torch's other modules have imported it from there, as the one that makes device meshes.
            for full_name, module in list(sys.modules.items()):
                if full_name.startswith("torch.distributed") and vars(module).get(name) is original:
                    self._replaced.append((module, name, original))
                    setattr(module, name, wrapped)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, name, original in reversed(self._replaced):
            setattr(module, name, original)
        self._replaced.clear()
        distributed = self._distributed
        if distributed is not None and self._backend is not None and not distributed.is_initialized():
            self._make(distributed.init_process_group, {"backend": self._backend})

    def all_agree(self, done: bool) -> bool:
        """Say whether every rank is done; each rank asks equally often.

        Args:
            done: whether this one is.
        """
        if self.size == 1:
            return done
        turn = next(self._rounds)
        self._store.set(f"cachectl/done/{turn}/{self.rank}", b"1" if done else b"0")
        return all(self._store.get(f"cachectl/done/{turn}/{rank}") == b"1" for rank in range(self.size))

    def _init(self, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        asked = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
        for name, here in (("world_size", self.size), ("rank", self.rank)):
            if asked.get(name, -1) not in (-1, None, here):
                raise ConfigError(
                    f"the program joins a world with {name} {asked[name]}, and this rank has {name} {here}",
                    hint="set topology.world_size to what the program is started with",
                )
        return self._make(original, asked)

    def _make(self, original: Callable[..., Any], asked: dict[str, Any]) -> Any:
        asked.pop("init_method", None)
        # A launcher's store serves several groups, one after the other.
        store = self._distributed.PrefixStore(f"cachectl/script/{next(self._groups)}", self._store)
        return original(**{**asked, "store": store, "rank": self.rank, "world_size": self.size})

    def _destroy(self, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return None if self.unwinding else original(*args, **kwargs)


def _wrapped(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return stand_in(original, args, kwargs)

    called.__name__ = original.__name__
    return called
