"""The rules of a compiled method that its calls show: random numbers, host reads, masks, caches.

Owns the names of functions that break a rule. Facts: torch 2.13's and torch_npu 2.13's documentation; what each does in
a captured graph: docs/model-rules.md.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from cachectl.services.checks.npu_rules import NpuRules
from cachectl.services.checks.reader import Reader
from cachectl.services.checks.state_rules import LENGTH_WORDS, text_of
from cachectl.services.checks.torch_calls import is_npu_operator, words_of
from cachectl.services.checks.values import (
    Const,
    Dim,
    Ext,
    ExtObj,
    Func,
    Host,
    Map,
    Obj,
    Seq,
    Shape,
    Tensor,
    Unknown,
    Value,
    alternatives,
    element_of,
    is_cache_name,
    is_tensor,
    words,
)
from cachectl.services.checks.watcher import Frame

__all__ = ["CompiledRules"]

_RANDOM = words(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial "
    "manual_seed seed native_dropout dropout alpha_dropout feature_dropout"
)

# Of torch.nn.init what draws nothing.
_FILLS = words("zeros_ ones_ constant_ eye_ dirac_ calculate_gain")

_RANDOM_METHODS = words(
    "normal_ uniform_ random_ bernoulli_ bernoulli exponential_ geometric_ cauchy_ log_normal_ multinomial"
)

_DROPOUTS = words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout gumbel_softmax rrelu")

_DROPOUT_MODULES = words("Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout RReLU")

_LOGS = words("debug info warning warn error critical exception log fatal trace success warning_once info_once")

_LOGGERS = words("logger log logging _logger _log rank_logger")

_NEW = words("zeros ones full empty tensor as_tensor eye scalar_tensor full_like")

_SIZED = words("zeros ones full empty eye")
_SELECTS = words("nonzero masked_select unique unique_consecutive argwhere bincount")

_JOINS = words("cat concat concatenate hstack vstack")

_GROWING = words("append extend insert")

_TORCHAIR = ("torchair.ops.", "torch_npu.dynamo.torchair.ops.", "torch.ops.air.")
_NO_MODULE = (Host, Const, Seq, Map, Obj, Shape, Dim)


class CompiledRules(NpuRules):
    """All rules of the compiled path."""

    def call(self, frame: Frame, node: ast.Call, callee: Value, args: list[Value], kwargs: dict[str, Value]) -> None:
        if isinstance(callee, ExtObj):
            self._module_called(frame, node, callee)
        elif isinstance(callee, Ext):
            self._named(frame, node, callee.path, args, kwargs)
        elif isinstance(node.func, ast.Subscript) and self.reader is not None:
            kernel = self.reader.quietly(node.func.value, frame)
            if isinstance(kernel, Func) and any(_is_triton(mark, frame, self.reader) for mark in kernel.decorators):
                self.report(frame, node, "triton-kernel", "warning", f"`{text_of(node.func)}` runs a Triton kernel")

    def _named(self, frame: Frame, node: ast.Call, path: str, args: list[Value], kwargs: Mapping[str, Value]) -> None:
        module, _, name = path.rpartition(".")
        shown = text_of(node)
        if (operator := is_npu_operator(path)) is not None:
            self.npu_operator(frame, node, operator, args, kwargs)
            return
        if module == "torch.Tensor" and args:
            self.method(frame, node, args[0], name, args[1:], dict(kwargs))
            return
        if path.startswith(_TORCHAIR):
            self.torchair_operator(frame, node, name, kwargs)
            return
        self.foreign_place(frame, node, kwargs)
        if module == "builtins":
            self._builtin(frame, node, name, args)
        elif (
            path.startswith(("random.", "numpy.random."))
            or (module == "torch" and name in _RANDOM)
            or (module == "torch.nn.init" and name not in _FILLS)
        ):
            if not (name == "dropout" and not _active(args, kwargs, "train", 2)):
                self.report(frame, node, "random-numbers", "error", f"`{shown}` draws random numbers")
        elif module == "torch.nn.functional" and name in _DROPOUTS:
            self._dropout(frame, node, name, args, kwargs)
        elif name == "scaled_dot_product_attention":
            if "dropout_p" in kwargs and not _is_zero(kwargs["dropout_p"]) and self._is_known(kwargs["dropout_p"]):
                self.report(frame, node, "random-numbers", "error", f"`{shown}` drops at random")
        elif path.startswith(("logging.", "loguru.", "warnings.warn", "pprint.", "sys.stdout.", "sys.stderr.")):
            if name != "getLogger":
                self.report(frame, node, "print", "error", f"`{shown}` in the compiled path")
        elif name in ("synchronize", "barrier"):
            self.report(frame, node, "stream-sync", "error", f"`{shown}` in the compiled path")
        elif path in ("torch.autograd.backward", "torch.autograd.grad", "torch.enable_grad") or (
            path == "torch.set_grad_enabled" and args != [Const(False)]
        ):
            self.report(frame, node, "backward", "error", f"`{shown}` in the compiled path")
        elif path in ("torch._dynamo.graph_break", "torch.compiler.graph_break"):
            self.report(frame, node, "graph-break", "error", f"`{shown}` breaks the graph")
        elif "causal" in name and "mask" in name:
            self.report(frame, node, "large-mask", "warning", f"`{shown}` makes a mask at every step")
        elif path.startswith("triton.") or (module == "torch.library" and name == "wrap_triton"):
            self.report(frame, node, "triton-kernel", "warning", f"`{shown}` in the compiled path")
        elif module == "torch":
            self._torch(frame, node, name, args, kwargs)
        elif module in ("math", "numpy") and any(is_tensor(arg) for arg in args):
            self.report(frame, node, "host-sync", "error", f"`{shown}` reads a tensor on the host")

    def _torch(self, frame: Frame, node: ast.Call, name: str, args: list[Value], kwargs: Mapping[str, Value]) -> None:
        shown = text_of(node)
        if name in ("arange", "range", "linspace"):
            self.report(frame, node, "computed-positions", "warning", f"`{shown}` at every step")
            for arg in (*args, *kwargs.values()):
                self.lengths_in(frame, arg, f"in `{shown}`")
        elif name in ("tril", "triu", "tril_indices", "triu_indices") or (name in _NEW and _is_square(node)):
            self.report(frame, node, "large-mask", "warning", f"`{shown}` at every step")
        elif name in _JOINS:
            self._joined(frame, node, args, kwargs)
        elif name in ("cos", "sin", "polar"):
            self._turn(frame, node, node.args[-1] if node.args else None, args[-1] if args else None)
        elif name in _SELECTS or (name == "where" and len(args) + len(kwargs) == 1):
            self.report(frame, node, "data-dependent-shape", "error", f"the shape of `{shown}` depends on values")
        elif name in ("equal", "allclose") and any(is_tensor(arg) for arg in args):
            self.report(frame, node, "host-sync", "error", f"`{shown}` reads tensors on the host")
        # A mask is reported as such; what it is made of is one thing with it.
        made = name in _SIZED and not _is_square(node)
        if made and self.setting.on_npu and "device" not in kwargs:
            what = f"`{shown}` names no device, and is made on the CPU"
            rewrite = "register it as a buffer, or pass device=x.device"
            self.report(frame, node, "not-on-npu", "warning", what, rewrite)

    def _builtin(self, frame: Frame, node: ast.Call, name: str, args: list[Value]) -> None:
        shown = text_of(node)
        tensors = [arg for arg in args if is_tensor(arg)]
        if name == "print":
            self.report(frame, node, "print", "error", f"`{shown}` in the compiled path")
        elif name in ("int", "float", "bool", "complex", "range", "round") and tensors:
            self.report(frame, node, "host-sync", "error", f"`{shown}` reads a tensor on the host")
        elif name in ("min", "max") and tensors and len(args) > 1:
            self.report(frame, node, "tensor-branch", "error", f"`{shown}` compares tensors in Python",
                        "write torch.minimum, torch.maximum or .clamp")  # fmt: skip
        elif name in ("any", "all") and args and is_tensor(element_of(args[0])):
            self.report(frame, node, "tensor-branch", "error", f"`{shown}` asks a tensor's value")
        elif name == "hash" and not (args and isinstance(args[0], Const) and isinstance(args[0].value, (int, float))):
            self.report(frame, node, "hash-order", "error", f"`{shown}` differs from process to process")

    def _dropout(self, frame: Frame, node: ast.Call, name: str, args: list[Value], kwargs: Mapping[str, Value]) -> None:
        index = 3 if name == "rrelu" else 2
        training = kwargs.get("training", args[index] if len(args) > index else Const(True))
        active = name == "gumbel_softmax" or self._trains(training) or _active(args, kwargs, "training", index)
        probability = kwargs.get("p", args[1] if len(args) > 1 else None)
        if active and (probability is None or not _is_zero(probability)):
            if name == "rrelu" and "training" not in kwargs:
                return
            self.report(frame, node, "random-numbers", "error", f"`{text_of(node)}` drops at random")

    def _trains(self, value: Value) -> bool:
        """Say whether `self.training` is passed, of a model that nothing sets to eval."""
        return self.setting.trains and isinstance(value, Host) and value.name == "training"

    def _is_known(self, value: Value) -> bool:
        return self.setting.trains or isinstance(value, Const)

    def _module_called(self, frame: Frame, node: ast.Call, callee: ExtObj) -> None:
        name = callee.path.rpartition(".")[2]
        if callee.path.startswith("torch.nn.") and name in _DROPOUT_MODULES:
            training = callee.attrs.get("training", Const(True) if self.setting.trains else Const(False))
            probability = callee.kwargs.get("p", callee.args[0] if callee.args else Const(0.5))
            if training != Const(False) and not _is_zero(probability):
                what = f"`{text_of(node)}` is {name} of a model that trains"
                self.report(frame, node, "random-numbers", "error", what)

    def _turn(self, frame: Frame, node: ast.Call, source: ast.AST | None, value: Value) -> None:
        """Report cos and sin of angles, once a function."""
        if not is_tensor(value) and not isinstance(value, Unknown):
            return
        known = [item for item in alternatives(value) if isinstance(item, Tensor)]
        name = text_of(source) if source is not None else ""
        words = {"freqs", "freq", "emb", "angle", "angles", "theta", "rope", "rotary", "phase", "phases"}
        if not (any(item.angles for item in known) or words_of(name) & words):
            return
        if id(frame.func) not in self._turned:
            self._turned.add(id(frame.func))
            self.report(frame, node, "computed-rotary", "warning", f"`{text_of(node)}` at every step")

    def _joined(self, frame: Frame, node: ast.Call, args: list[Value], kwargs: Mapping[str, Value]) -> None:
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else Const(0)))
        if dim == Const(-1):
            return  # Features beside each other, no more tokens.
        source = node.args[0] if node.args else None
        parts = list(source.elts) if isinstance(source, (ast.Tuple, ast.List)) else []
        values = list(args[0].items) if args and isinstance(args[0], Seq) and args[0].items is not None else []
        caches = []
        for index, part in enumerate(parts):
            value = values[index] if index < len(values) else None
            homes = [item.home for item in alternatives(value) if isinstance(item, Tensor)]
            caches.append(any(is_cache_name(name) for name in (_plain_name(part), *homes)))
        if any(caches) and not all(caches):
            grown = text_of(parts[caches.index(True)])
            self.report(frame, node, "grown-cache", "error", f"`{grown}` grows by torch.cat at every step")

    def method(
        self, frame: Frame, node: ast.Call, receiver: Value, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> None:
        shown = text_of(node)
        plain = isinstance(receiver, _NO_MODULE)
        if name == "synchronize":
            self.report(frame, node, "stream-sync", "error", f"`{shown}` in the compiled path")
        elif (name == "backward" and not plain) or (
            name in ("zero_grad", "step") and "optim" in _receiver_name(node).lower()
        ):
            self.report(frame, node, "backward", "error", f"`{shown}` in the compiled path")
        elif name in _LOGS and _is_logger(receiver, node):
            self.report(frame, node, "print", "error", f"`{shown}` in the compiled path")
        elif name in _GROWING and isinstance(receiver, Seq):
            self._appended(frame, node, receiver, args)
        elif not plain and name in ("item", "tolist", "numpy", "cpu") and not (args and name == "item"):
            self.report(frame, node, "host-sync", "error", f"`{shown}` reads a tensor on the host")
        elif name in ("sample", "rsample") and isinstance(receiver, ExtObj):
            if receiver.path.startswith("torch.distributions."):
                self.report(frame, node, "random-numbers", "error", f"`{shown}` draws random numbers")
        elif isinstance(receiver, Tensor):
            self._tensor_method(frame, node, receiver, name, args, kwargs)
        elif not plain and name in _RANDOM_METHODS and name.endswith("_"):
            self.report(frame, node, "random-numbers", "error", f"`{shown}` draws random numbers")
        elif name in ("cos", "sin") and isinstance(receiver, Unknown):
            self._turn(frame, node, node.func.value, receiver)  # type: ignore[attr-defined]
        elif name == "register_buffer" and isinstance(receiver, Obj):
            self.report(frame, node, "rebound-buffer", "error", f"`{shown}` in the compiled path")
        if name in ("to", "cuda") and not isinstance(receiver, (Host, Seq, Map)):
            self.foreign_place(frame, node, kwargs, args, name)

    def _tensor_method(
        self, frame: Frame, node: ast.Call, receiver: Tensor, name: str, args: list[Value], kwargs: Mapping[str, Value]
    ) -> None:
        shown = text_of(node)
        if name in _RANDOM_METHODS:
            self.report(frame, node, "random-numbers", "error", f"`{shown}` draws random numbers")
        elif name == "requires_grad_":
            if not (args and args[0] == Const(False)):
                self.report(frame, node, "backward", "error", f"`{shown}` in the compiled path")
        elif receiver.kind and name in ("set_", "resize_", "resize_as_"):
            self.report(frame, node, "rebound-buffer", "error", f"`{shown}` gives it other memory")
        elif receiver.kind == "parameter" and name.endswith("_") and not name.endswith("__"):
            self.report(frame, node, "parameter-written", "error", f"`{shown}` writes a parameter")
        elif name in _SELECTS:
            self.report(frame, node, "data-dependent-shape", "error", f"the shape of `{shown}` depends on values")
        elif name in ("tril", "triu", "tril_", "triu_"):
            self.report(frame, node, "large-mask", "warning", f"`{shown}` at every step")
        elif name in ("cos", "sin"):
            self._turn(frame, node, node.func.value, receiver)  # type: ignore[attr-defined]
        elif name in ("equal", "allclose"):
            self.report(frame, node, "host-sync", "error", f"`{shown}` reads tensors on the host")
        elif name in ("narrow", "index_select") and any(is_tensor(arg) for arg in args[1:]) and name == "narrow":
            self.report(frame, node, "host-sync", "error", f"`{shown}` is cut at a tensor's value")

    def _appended(self, frame: Frame, node: ast.Call, receiver: Seq, args: list[Value]) -> None:
        target = node.func.value if isinstance(node.func, ast.Attribute) else None
        if not isinstance(target, (ast.Attribute, ast.Subscript)) or self.reader is None:
            return
        root: ast.AST = target
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        owner = self.reader.quietly(root, frame) if isinstance(root, ast.Name) else None
        if not isinstance(owner, Obj) or owner.name == "local":
            return
        if args and is_tensor(args[-1]):
            self.report(frame, node, "grown-cache", "error", f"the list `{text_of(target)}` grows at every step")
        else:
            self.report(frame, node, "changed-attribute", "error", f"the list `{text_of(target)}` grows at every step")


def _active(args: list[Value], kwargs: Mapping[str, Value], name: str, index: int) -> bool:
    """Say whether a dropout's argument for training is on, as far as is known: it is, where it is left out."""
    training = kwargs.get(name, args[index] if len(args) > index else Const(True))
    return isinstance(training, Const) and bool(training.value)


def _is_zero(value: Value) -> bool:
    return isinstance(value, Const) and not isinstance(value.value, str) and not value.value


def _is_square(node: ast.Call) -> bool:
    """Say whether a new tensor's last two sizes are both numbers of tokens."""
    sizes = [item for item in node.args if not isinstance(item, ast.Starred)]
    if sizes and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = list(sizes[0].elts)
    if len(sizes) < 2:
        return False
    last = sizes[-2:]
    if (
        isinstance(node.func, ast.Attribute)
        and node.func.attr == "full"
        and not isinstance(node.args[0], (ast.Tuple, ast.List))
    ):
        return False
    return all(any(words_of(name) & LENGTH_WORDS for name in _names(size)) for size in last)


def _names(node: ast.AST) -> list[str]:
    return [
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, (ast.Name, ast.Attribute))
    ]


def _plain_name(node: ast.AST) -> str:
    """Return the name that stands nearest to a value: `past` of self.past[layer]."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _receiver_name(node: ast.Call) -> str:
    """Return the name of what a method is called on."""
    return _plain_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""


def _is_logger(receiver: Value, node: ast.Call) -> bool:
    if isinstance(receiver, ExtObj):
        return receiver.path.endswith("Logger")
    return _receiver_name(node).lower() in _LOGGERS and not isinstance(receiver, (Tensor, Obj))


def _is_triton(mark: ast.expr, frame: Frame, reader: Reader) -> bool:
    value = reader.quietly(mark.func if isinstance(mark, ast.Call) else mark, reader.module_frame(frame.module))
    return isinstance(value, Ext) and value.path.startswith("triton")
