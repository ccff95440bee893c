"""What calls of torch, torch_npu and Python's builtins return, as the reader of source text needs it.

Owns tables of names. Facts: torch 2.13's and torch_npu 2.13's own documentation of these functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cachectl.services.checks.values import (
    HOST,
    NONE,
    TENSOR,
    UNKNOWN,
    Const,
    Dim,
    ExtObj,
    Map,
    Seq,
    Shape,
    Tensor,
    Value,
    alternatives,
    element_of,
    has_tensor,
    is_tensor,
    words,
)

__all__ = [
    "FREQUENCY_WORDS",
    "TENSOR_METHODS",
    "external_call",
    "is_npu_operator",
    "tensor_attribute",
    "tensor_method",
    "words_of",
]

FREQUENCY_WORDS = frozenset({"inv", "freq", "freqs", "frequency", "frequencies", "invfreq", "angle", "angles", "omega"})

_HOST_ATTRIBUTES = words(
    "device dtype layout ndim is_cuda is_npu is_cpu is_meta is_sparse is_quantized requires_grad names grad_fn "
    "is_leaf itemsize nbytes grad"
)
_HOST_METHODS = words(
    "dim ndimension numel nelement stride is_contiguous is_floating_point is_complex is_signed is_inference "
    "element_size get_device data_ptr storage_offset item tolist numpy type __len__ untyped_storage equal "
    "allclose is_same_size is_set_to is_pinned register_hook"
)
_SEVERAL = words(
    "split chunk unbind tensor_split split_with_sizes hsplit vsplit dsplit topk sort aminmax meshgrid "
    "broadcast_tensors unsafe_chunk unsafe_split frexp slogdet svd qr eig eigh kthvalue mode cummax cummin "
    "unique_consecutive var_mean std_mean"
)
# Views: the same memory under another shape.
_VIEWS = words(
    "view view_as reshape reshape_as flatten unflatten unsqueeze squeeze transpose permute t swapaxes swapdims "
    "movedim expand expand_as narrow select detach alias as_strided diagonal to type_as float half bfloat16 "
    "double int long npu cuda cpu contiguous index_select gather repeat repeat_interleave clone"
)
_COPIES = words("contiguous clone repeat repeat_interleave index_select gather")
_BOOLEAN = words(
    "eq ne lt le gt ge any all isnan isinf isfinite logical_and logical_or logical_not logical_xor bool isin "
    "isclose greater less greater_equal less_equal not_equal signbit"
)
# Methods that only tensors have: whatever has them is one.
TENSOR_METHODS = words(
    "view unsqueeze squeeze transpose permute contiguous softmax masked_fill masked_fill_ argmax matmul bmm float "
    "half bfloat16 long expand flatten unflatten clamp detach index_select scatter_ scatter copy_ fill_ zero_ "
    "add_ mul_ index_copy_ index_put_ rsqrt cumsum repeat_interleave item unbind chunk masked_select nonzero "
    "type_as expand_as reshape sigmoid silu gather"
    " sum mean any all amax amin norm abs exp sqrt square argmin topk max min"
)

_HOST_FUNCTIONS = re.compile(
    r"torch\.(is_tensor|is_floating_point|is_complex|numel|device|Size|finfo|iinfo|get_default_dtype|is_grad_enabled|"
    r"is_inference_mode_enabled|result_type|promote_types|can_cast|equal|allclose|is_storage|typename|no_grad|"
    r"inference_mode|enable_grad|autocast|set_default_device|set_default_dtype|manual_seed|set_num_threads|"
    r"set_grad_enabled|get_default_device)|"
    r"torch\.(cuda|npu|distributed|jit|compiler|_dynamo|_logging|backends|autograd|profiler|utils|version|library|"
    r"multiprocessing|_C|hub|testing|accelerator|random|overrides|fx|_inductor|_functorch|onnx)\..*|torch_npu\.npu\..*"
)
_BUILTIN_HOST = words(
    "len isinstance issubclass hasattr callable id hash repr str ord chr bool int float complex bytes round "
    "divmod format type any all input open dir vars hex bin"
)


def words_of(name: str) -> set[str]:
    """Return the words of a Python name, in lower case."""
    return {word for part in name.split("_") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", part.lower())}


def is_npu_operator(path: str) -> str | None:
    """Return the npu operator's name that a dotted name means, None if it is none."""
    for prefix in ("torch.ops.npu.", "torch_npu."):
        if path.startswith(prefix):
            rest = path.removeprefix(prefix)
            name = rest.partition(".")[0]
            if prefix == "torch_npu." and (rest != name or not re.match(r"_?npu_|scatter_update", name)):
                return None
            return name
    return None


def tensor_attribute(tensor: Tensor, name: str, node: object) -> Value:
    """Return what an attribute of a tensor is."""
    if name == "shape":
        return Shape(tensor.home or tensor.name, node)  # type: ignore[arg-type]
    if name in _HOST_ATTRIBUTES:
        return HOST
    return replace(tensor, sliced="", name="")


def tensor_method(tensor: Tensor, name: str, args: Sequence[Value], node: object) -> Value:
    """Return what a tensor's method returns."""
    owner = tensor.home or tensor.name
    if name == "size":
        if not args:
            return Shape(owner, node)  # type: ignore[arg-type]
        index = args[0].value if isinstance(args[0], Const) and isinstance(args[0].value, int) else None
        return Dim(owner, index, node) if index is not None else HOST  # type: ignore[arg-type]
    if name in _HOST_METHODS and not (name == "type" and args):
        return HOST
    kept = Tensor(ramp=tensor.ramp, angles=tensor.angles)
    if name in _SEVERAL or (name in ("max", "min", "median") and args):
        return Seq("tuple", None, kept)
    if name in _BOOLEAN:
        return Tensor(boolean=True)
    if name in _VIEWS:
        sliced = "" if name in _COPIES else tensor.sliced or ("narrow" if name == "narrow" else "")
        home = "" if name in _COPIES else tensor.home
        return replace(tensor, name="", sliced=sliced, home=home, kind=tensor.kind if home else "")
    if name.endswith("_") and not name.endswith("__"):
        return tensor
    if name == "shape":
        return HOST
    return kept


def external_call(path: str, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
    """Return what a call of another package's function or class returns."""
    module, _, name = path.rpartition(".")
    if path in ("builtins.dict", "collections.OrderedDict"):
        return _mapping(args, kwargs)
    if module == "builtins":
        return _builtin(name, args)
    if path == "torch.nn.Parameter" or path == "torch.nn.parameter.Parameter":
        return Tensor(kind="parameter")
    if path in ("torch.nn.Buffer", "torch.nn.parameter.Buffer"):
        return Tensor(kind="buffer")
    if path == "torch.nn.ModuleList":
        return _sequence("list", args[0]) if args else Seq("list", (), None)
    if path == "torch.nn.ModuleDict":
        return args[0] if args and isinstance(args[0], Map) else Map({}, UNKNOWN)
    if path in ("torch.compiler.is_compiling", "torch._dynamo.is_compiling", "torch.compiler.is_dynamo_compiling"):
        return Const(True)
    if path in ("torch.jit.is_scripting", "torch.jit.is_tracing", "torch.onnx.is_in_onnx_export"):
        return Const(False)
    if path in ("copy.copy", "copy.deepcopy", "typing.cast"):
        return args[-1] if args else UNKNOWN
    if path.startswith("torch.nn.functional."):
        return Seq("tuple", None, TENSOR) if "return_indices" in kwargs else _of_tensors(args)
    if name[:1].isupper() and not path.startswith("torch.ops."):
        if path.startswith("torch.") and name.endswith("Tensor"):
            return TENSOR
        return ExtObj(path, tuple(args), dict(kwargs))
    if path.startswith("torch.nn.init."):
        return args[0] if args else TENSOR
    if _HOST_FUNCTIONS.fullmatch(path):
        return HOST if not path.endswith(("current_stream", "default_stream")) else ExtObj("torch.npu.Stream")
    if path.startswith(("torch.ops.", "torch_npu.", "torchair.ops.", "torch_npu.dynamo.torchair.ops.")):
        return TENSOR
    if path.startswith("torch."):
        if name in _SEVERAL or (name in ("max", "min", "median") and len(args) + len(kwargs) > 1):
            return Seq("tuple", None, _of_tensors(args))
        if name in ("arange", "range", "linspace"):
            return Tensor(ramp=True)
        if name in _BOOLEAN:
            return Tensor(boolean=True)
        return _of_tensors(args)
    if module == "math" or path.startswith(("os.", "sys.", "time.", "platform.")):
        return HOST
    if path in ("logging.getLogger", "loguru.logger"):
        return ExtObj("logging.Logger")
    if path == "functools.partial":
        return ExtObj(path, tuple(args), dict(kwargs))
    return UNKNOWN


def _of_tensors(args: Sequence[Value]) -> Tensor:
    """Return a new tensor, made of positions or angles if one of the arguments is."""
    tensors = [member for arg in args for part in _parts(arg) for member in alternatives(part)]
    found = [item for item in tensors if isinstance(item, Tensor)]
    return Tensor(
        ramp=bool(found) and all(item.ramp for item in found),
        angles=any(item.angles or bool(words_of(item.home or item.name) & FREQUENCY_WORDS) for item in found)
        and (len(found) > 1 or any(item.angles for item in found)),
    )


def _parts(value: Value) -> Sequence[Value]:
    if isinstance(value, Seq):
        return value.items if value.items is not None else (value.element,)
    return (value,)


def _builtin(name: str, args: Sequence[Value]) -> Value:
    first = args[0] if args else None
    if name == "len" and isinstance(first, Seq) and first.items is not None:
        return Const(len(first.items))
    if name in _BUILTIN_HOST:
        if isinstance(first, Dim) and name == "int":
            return first
        if isinstance(first, Const) and name in ("int", "float", "str", "bool"):
            try:
                return Const({"int": int, "float": float, "str": str, "bool": bool}[name](first.value), first.given)
            except (TypeError, ValueError, OverflowError):
                return HOST
        return HOST
    if name == "range":
        count = first.value if len(args) == 1 and isinstance(first, Const) else None
        return Seq("range", () if count == 0 else None, HOST)
    if name in ("list", "tuple", "set", "frozenset", "sorted", "reversed", "iter"):
        kind = name if name in ("list", "tuple", "set") else "list"
        return _sequence(kind, first) if first is not None else Seq(kind, (), None)
    if name == "enumerate":
        if isinstance(first, Seq) and first.items is not None:
            return Seq("list", tuple(Seq("tuple", (Const(i), item)) for i, item in enumerate(first.items)))
        return Seq("list", None, Seq("tuple", (HOST, element_of(first) if first is not None else UNKNOWN)))
    if name == "zip":
        return Seq("list", None, Seq("tuple", tuple(map(element_of, args))))
    if name in ("min", "max", "sum", "abs", "pow"):
        numbers = [element_of(first)] if len(args) == 1 and name != "abs" and first is not None else list(args)
        if any(is_tensor(item) for item in numbers):
            return TENSOR
        return HOST if not any(has_tensor(item) for item in numbers) else UNKNOWN
    if name == "next":
        return element_of(first) if first is not None else UNKNOWN
    if name == "slice":
        return HOST
    if name in ("print", "setattr", "delattr"):
        return NONE
    if name == "object":
        return UNKNOWN
    return UNKNOWN


def _mapping(args: Sequence[Value], kwargs: Mapping[str, Value]) -> Map:
    """Return the dict that a call of dict makes."""
    first = args[0] if args else Map({})
    known = {name: value for name, value in kwargs.items() if name != "**"}
    rest = UNKNOWN if "**" in kwargs else None
    if isinstance(first, Map):
        return Map({**first.known, **known}, first.rest if first.rest is not None else rest)
    pair = element_of(first)
    value = pair.items[1] if isinstance(pair, Seq) and pair.items is not None and len(pair.items) == 2 else UNKNOWN
    return Map(known, value)


def _sequence(kind: str, value: Value | None) -> Value:
    if isinstance(value, Seq):
        return Seq(kind, value.items, value.element)
    if isinstance(value, Shape):
        return value
    return Seq(kind, None, element_of(value) if value is not None else UNKNOWN)
