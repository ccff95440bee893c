"""What bytecode_<minor>.bin is compiled from: the outer form of the code Dynamo makes."""

import marshal
import sys
import types

SOURCE = """
def main_decode(self, x, kv):
    device = __import_torch.device("npu", 3)
    graph_out_0 = __compiled_fn_1_a(self._modules["layer"]._parameters["weight"], x, kv, device)
    return graph_out_0[0], [item for item in graph_out_0]
"""


def main() -> None:
    """Write the marshalled code of this interpreter to the file named on the command line."""
    namespace: dict[str, types.FunctionType] = {}
    exec(compile(SOURCE, "/srv/example/decode.py", "exec"), namespace)
    with open(sys.argv[1], "wb") as target:
        target.write(marshal.dumps(namespace["main_decode"].__code__))


if __name__ == "__main__":
    main()
