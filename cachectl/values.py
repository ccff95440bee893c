"""Classes of named values for the boot path: dataclasses in all that is used of them, without their price at start.

Owns a smaller `dataclass`, `field` and `replace`. The standard one imports inspect, ast and tokenize, and compiles the
methods of every class anew in each process: of the hook's 84 ms of start it took 30. What is not here is refused, so
that nothing differs unseen: no inheritance of fields, no options but `frozen`. Type checkers see the standard one, and
so do `dataclasses.replace` and `dataclasses.fields`, which find what they need when they first ask. Standard library
only; imports nothing of ours.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:

    class _Missing:
        """Stands for no default."""

    class _Field:
        """One field's default; `make` is called for each new object."""

        __slots__ = ("default", "make", "shown")

        def __init__(self, default, make, shown):
            self.default, self.make, self.shown = default, make, shown

    def field(*, default=_Missing, default_factory=_Missing, repr=True):  # noqa: A002 - the standard one's name
        """Return a field's default, as `dataclasses.field`."""
        return _Field(default, default_factory, repr)

    def dataclass(cls=None, /, *, frozen=False):
        """Make a class of named values of its annotations, as `dataclasses.dataclass`."""
        if cls is None:
            return lambda made: dataclass(made, frozen=frozen)
        if any("__value_fields__" in vars(base) for base in cls.__mro__):
            raise TypeError(f"{cls.__name__} inherits fields: use dataclasses.dataclass")
        fields = {}
        for name in vars(cls).get("__annotations__", {}):
            found = vars(cls).get(name, _Missing)
            fields[name] = found if isinstance(found, _Field) else _Field(found, _Missing, True)
            if isinstance(found, _Field):
                if found.default is _Missing:
                    delattr(cls, name)
                else:
                    setattr(cls, name, found.default)
        methods = {"__init__": _init, "__repr__": _repr, "__eq__": _eq, "__hash__": _hash if frozen else None}
        if frozen:
            methods.update(__setattr__=_refuse, __delattr__=_refuse)
        for name, method in methods.items():
            # What a class says itself stands, as with the standard one.
            if name not in vars(cls):
                setattr(cls, name, method)
        cls.__match_args__ = tuple(fields)
        cls.__value_fields__ = fields
        cls.__dataclass_fields__ = _StandardFields()
        return cls

    def replace(value, /, **changes):
        """Return a copy with other values, as `dataclasses.replace`; takes the standard dataclasses too."""
        if not hasattr(type(value), "__value_fields__"):
            from dataclasses import replace as standard

            return standard(value, **changes)
        return type(value)(**{**{name: getattr(value, name) for name in value.__value_fields__}, **changes})

    def _init(self, *args, **named):
        fields = self.__value_fields__
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__} has {len(fields)} fields, got {len(args)} values")
        given = dict(zip(fields, args, strict=False))
        values = self.__dict__
        for name, item in fields.items():
            if name in named:
                if name in given:
                    raise TypeError(f"{type(self).__name__} got several values for {name}")
                values[name] = named.pop(name)
            elif name in given:
                values[name] = given[name]
            elif item.default is not _Missing:
                values[name] = item.default
            elif item.make is not _Missing:
                values[name] = item.make()
            else:
                raise TypeError(f"{type(self).__name__} needs a value for {name}")
        if named:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(named)}")

    def _values(self):
        return tuple(getattr(self, name) for name in self.__value_fields__)

    def _repr(self):
        shown = (f"{name}={getattr(self, name)!r}" for name, item in self.__value_fields__.items() if item.shown)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _eq(self, other):
        return _values(self) == _values(other) if type(other) is type(self) else NotImplemented

    def _hash(self):
        return hash(_values(self))

    def _refuse(self, name, *value):
        from dataclasses import FrozenInstanceError  # an error of the program's, never met at a boot

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    class _StandardFields:
        """What the standard module's functions look for in a class, made when they do."""

        def __get__(self, value, owner):
            import dataclasses  # 12 ms that the hook does without

            made = dataclasses.make_dataclass(owner.__name__, [(name, object) for name in owner.__value_fields__])
            owner.__dataclass_fields__ = made.__dataclass_fields__
            return made.__dataclass_fields__


__all__ = ["dataclass", "field", "replace"]
