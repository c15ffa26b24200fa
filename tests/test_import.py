"""The effects of `import torchweld`, and the things that it does not change."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from importlib import import_module
from importlib.machinery import SourceFileLoader

import pytest
import torch.distributed as dist

from commands import python
from torchweld._on_import import when_imported


def run_python(code: str, *arguments: str) -> str:
    done = python("-W", "error::UserWarning", "-c", textwrap.dedent(code), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_leaves_other_packages_alone():
    code = """
    import sys, torch
    before = list(sys.meta_path), list(sys.path_hooks)
    import torchweld
    ours, *others = sys.meta_path
    print((others, sys.path_hooks) == before, sorted(ours.waiting), "transformers" in sys.modules)
    """
    assert run_python(code) == f"True {SLOW} False\n"


SLOW = ["torch.distributed.tensor", "torch.utils.flop_counter"]
USES = {
    "torch.distributed.tensor": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
x = distribute_tensor(torch.randn(4, 8), init_device_mesh("cpu", (1,)), [Shard(0)])
assert torchweld.softmax(x).placements == (Shard(0),)
""",
    "torch.utils.flop_counter": """
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torchweld.linear(torch.ones(8, 16), torch.ones(4, 16))
assert counter.get_total_flops() == 2 * 8 * 16 * 4
""",
}


def uses(name):
    if name == "torch.distributed.tensor" and not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    return USES[name]


@pytest.mark.parametrize("name", SLOW)
def test_slow_modules_of_torch_are_extended_when_they_are_imported(name):
    code = f"""
import sys, torch, torchweld
assert {name!r} not in sys.modules
{uses(name)}
assert {name!r} not in sys.meta_path[0].waiting
"""
    run_python(code)


def test_a_function_waits_until_a_module_has_been_imported(tmp_path, monkeypatch):
    """A look-up and an import that fails leave it waiting; the module's loader is its own."""
    path, calls = tmp_path / "waited_for.py", []
    path.write_text("raise ImportError('not yet')\n")
    monkeypatch.syspath_prepend(tmp_path)
    when_imported("waited_for", lambda: calls.append(sys.modules["waited_for"].value))
    assert importlib.util.find_spec("waited_for").origin == str(path)
    with pytest.raises(ImportError, match="not yet"):
        import_module("waited_for")
    assert "waited_for" not in sys.modules and calls == []

    path.write_text("value = 'the second time'\n")
    importlib.invalidate_caches()
    module = import_module("waited_for")
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert calls == ["the second time"] and inspect.getsource(module) == path.read_text()
    importlib.reload(module)
    assert len(calls) == 1
    when_imported("waited_for", lambda: calls.append("at once"))
    assert calls[1:] == ["at once"]
    del sys.modules["waited_for"]


def test_threads_import_slow_modules_at_once():
    code = f"""
import importlib, sys, threading
import torch
names = {SLOW} + ["torchweld"]
start = threading.Barrier(4 * len(names))
def load(name):
    start.wait()
    importlib.import_module(name)
threads = [threading.Thread(target=load, args=(name,)) for name in 4 * names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
import torchweld
{"".join(map(uses, SLOW))}
assert not sys.meta_path[0].waiting
"""
    run_python(code)


def test_transformers_is_not_patched():
    pytest.importorskip("transformers")
    code = """
    import transformers.modeling_utils as modeling
    stock = dict(vars(modeling.PreTrainedModel))
    import torchweld
    from torchweld.integrations import register_attention
    print("torchweld" in modeling.ALL_ATTENTION_FUNCTIONS)
    register_attention()
    print("torchweld" in modeling.ALL_ATTENTION_FUNCTIONS)
    print(dict(vars(modeling.PreTrainedModel)) == stock)
    """
    assert run_python(code) == "False\nTrue\nTrue\n"


def test_the_name_is_unknown_without_registration():
    pytest.importorskip("transformers")
    code = """
    import torchweld, transformers
    settings = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config = transformers.LlamaConfig(**settings, num_attention_heads=4)
    try:
        transformers.LlamaForCausalLM._from_config(config, attn_implementation="torchweld")
    except ValueError as error:
        print("torchweld" in str(error))
    """
    assert run_python(code) == "True\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import torchweld.integrations, transformers",
        "from transformers import LlamaForCausalLM; import torchweld.integrations, transformers",
    ],
)
def test_attention_can_be_registered_in_any_order_of_imports(imports):
    pytest.importorskip("transformers")
    code = """
    import torch
    {imports}
    torchweld.integrations.register_attention()
    settings = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config = transformers.LlamaConfig(**settings, num_attention_heads=4)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="torchweld")
    from torchweld.integrations.attention import forward as hf_attention
    from torch.utils._python_dispatch import TorchDispatchMode
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            print(op)
            return op(*args, **(kwargs or {{}}))
    with torch.no_grad(), Seen():
        model(torch.tensor([[5, 3, 7]]))
    """
    assert "torchweld.attention.default" in run_python(code.format(imports=imports))


AGAIN = {
    "reload": "importlib.reload(torchweld)",
    "anew": """
for name in [name for name in sys.modules if name.split(".")[0] == "torchweld"]:
    del sys.modules[name]
""",
}


@pytest.mark.parametrize(
    ("again", "others"),
    [("reload", "none"), ("reload", "first"), ("anew", "first"), ("anew", "last")],
)
def test_a_second_import_in_one_process(again, others):
    """The packages that torchweld supports may be imported before or after it."""
    needed = ["torch.utils.flop_counter", "torch.distributed.tensor"]
    if importlib.util.find_spec("transformers"):
        needed.append("transformers.modeling_utils")
    served = "; ".join(f"import {name}" for name in needed)
    lines = [
        "import importlib, sys",
        "import torch",
        served if others == "first" else "",
        "import torchweld",
        "first = torchweld",
        *[AGAIN[again], "import torchweld"] * 2,
        served if others == "last" else "",
        """
x, w = torch.randn(3, 4), torch.randn(2, 4)
assert (torchweld is first) == (sys.argv[1] == "reload")
for module in (first, torchweld):
    assert module.is_available() and str(module.info())
    def loss(x): return module.linear(x, w, activation="relu").sum()
    def eager(x): return torch.relu(x @ w.T).sum()
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(eager)(x))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), torch.func.grad(eager)(x))
    torch.jit.script(module.nn.Softmax())(x)
    str(module.explain("softmax", torch.empty(4, 4, device="meta")))
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        module.linear(x, w)
    assert counter.get_total_flops() == 2 * 3 * 4 * 2
print("right")
""",
    ]
    assert run_python("\n".join(lines), again) == "right\n"
