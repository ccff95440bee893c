"""Guards on the state around a call, and on shapes that stayed symbolic.

Owns the reading of Dynamo's global state, modes and shape environment. Rank processes only.
"""

from __future__ import annotations

from typing import Any

from cachectl.build.guard_places import Places
from cachectl.identity.guard_expressions import parse_expression
from cachectl.identity.guard_values import Unsayable

__all__ = ["Ambient", "concrete"]


class Ambient(Places):
    """State around the call and dynamic shapes, for one compilation while it is read."""

    def add_global_state(self, guard: Any) -> None:
        ambient = self.reader.ambient(self.graph.global_state_guard)
        for name in (
            "default_device",
            "saved_tensors_hooks",
            "torch_function_modes",
            "functorch_depth",
            "forward_ad_level",
        ):
            del ambient[name]
        self.sheet.add_ambient(ambient)

    def add_function_modes(self, guard: Any) -> None:
        modes = getattr(self.graph, "torch_function_mode_stack", None) or ()
        self.sheet.add_ambient({"torch_function_modes": [self.reader.class_name(type(mode)) for mode in modes]})

    def add_default_device(self, guard: Any) -> None:
        device = self.graph.current_device
        self.sheet.add_ambient({"default_device": None if device is None else self.reader.device(device)})

    def add_saved_tensors_hooks(self, guard: Any) -> None:
        if self.reader.ambient()["saved_tensors_hooks"]:
            raise Unsayable("saved-tensor hooks that are compiled into the graph")
        self.sheet.add_ambient({"saved_tensors_hooks": False})

    def add_functorch(self, guard: Any) -> None:
        if self.graph.functorch_layers:
            raise Unsayable("functorch transforms around the call")
        self.sheet.add_ambient({"functorch_depth": 0})

    def add_forward_ad(self, guard: Any) -> None:
        self.sheet.add_ambient({"forward_ad_level": self.graph.dual_level})

    def add_deterministic_level(self, guard: Any) -> None:
        level = self.reader.deterministic_level()
        if level is None:
            raise Unsayable("torch_npu's deterministic level, which this torch_npu does not tell")
        self.sheet.add_ambient({"npu_deterministic_level": level})

    def ignore(self, guard: Any) -> None:
        """Do nothing: torch installs no check for it on its own, the global state guard covers it."""

    # Dynamic shapes.

    def add_expressions(self, guard: Any) -> None:
        for text in dict.fromkeys(guard.code_list or ()):
            try:
                self.sheet.add_expression(parse_expression(text, self.aliases))
            except Unsayable as error:
                self.refuse(guard, f"{error} in {text!r}")

    def dynamic(self) -> dict[str, list[int | None]]:
        environment = getattr(self.graph, "shape_env", None)
        found: dict[str, list[int | None]] = {}
        if environment is None:
            return found
        for tracked in environment.tracked_fakes or ():
            name = tracked.source.name
            if isinstance(tracked.fake, self.reader.torch.Tensor):
                leaves = {f"{name}.size()[{place}]": size for place, size in enumerate(tracked.fake.shape)}
            else:
                leaves = {name: tracked.fake}
            for leaf, size in leaves.items():
                if isinstance(size, self.reader.torch.SymInt) and (bounds := _bounds(environment, size)) is not None:
                    found[leaf] = bounds
        return dict(sorted(found.items()))


def concrete(size: Any) -> int | None:
    """Return a size or stride as torch's tensor guard keeps it: None where it is symbolic."""
    return int(size) if isinstance(size, int) else size.node.maybe_as_int()


def _bounds(environment: Any, size: Any) -> list[int | None] | None:
    """Return the bounds of a symbolic integer; None where guards made it a constant after all."""
    expression = environment.replace(size.node.expr)
    if expression.is_number:
        return None
    bounds = environment.bound_sympy(expression)
    # An unbounded end is sympy's infinity or torch's own for integers.
    return [int(end) if end.is_Integer else None for end in (bounds.lower, bounds.upper)]
