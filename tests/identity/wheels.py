"""What the installed wheels say of compile options and Dynamo fields, in a form short enough to be read here."""

from __future__ import annotations

from pathlib import Path

WHEEL = """\
from npugraph_ex.configs._option_base import OptionValue, IntRangeValue, CallableValue, IntListValue, DictOptionValue

INT64_MAX = 2**63 - 1


class CompilerConfig(NpuBaseConfig):
    def __init__(self):
        self.force_eager = OptionValue(False, [True, False])
        self.use_graph_pool = None
        self.capture_limit = IntRangeValue(64, 1, INT64_MAX)
        self.inplace_pass = OptionValue(True, [True, False])
        self.capture_error_mode = OptionValue("global", ["global", "relaxed"])
        self.data_dump_dir = MustExistedPathValue("./")
        self.post_grad_custom_pre_pass = CallableValue(None)
        self.sym_range = IntListValue(None)
        self.super_kernel_optimize_options = DictOptionValue(None)
        super(CompilerConfig, self).__init__()
        self._fixed_attrs.append("use_graph_pool")
"""
DYNAMO = """\
verbose = os.environ.get("TORCHDYNAMO_VERBOSE") == "1"
recompile_limit = 8
cache_size_limit: int = Config(alias="torch._dynamo.config.recompile_limit")
fail_on_recompile_limit_hit = False
specialize_int: bool = False
automatic_dynamic_shapes = True
if sys.version_info >= (3, 14):
    twice = 1
else:
    twice = 2
"""


def write_options(site: Path) -> None:
    """Give the torch and torch_npu of a folder their options."""
    for place, text in (
        ("torch_npu/dynamo/npugraph_ex/configs/compiler_config.py", WHEEL),
        ("torch/_dynamo/config.py", DYNAMO),
    ):
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_text(text)
