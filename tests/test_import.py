"""The effects of `import torchweld`, and the things that it does not change."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_leaves_other_packages_alone():
    code = """
    import sys, torch
    before = list(sys.meta_path), list(sys.path_hooks)
    import torchweld
    print((sys.meta_path, sys.path_hooks) == before, "transformers" in sys.modules)
    """
    assert run_python(code) == "True False\n"


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
