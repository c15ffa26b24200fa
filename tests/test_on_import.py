"""What torchweld does when another package is imported: formulas and attention are registered."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap

import pytest

from torchweld._on_import import when_imported


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that fails as long as a file says so, and that file."""
    (tmp_path / "a_new_module.py").write_text(
        "import pathlib\n"
        "if pathlib.Path(__file__).with_name('fails').exists(): raise ValueError('not now')\n"
        "value = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "a_new_module", tmp_path / "fails"
    sys.modules.pop("a_new_module", None)


def test_callback_follows_the_import(module):
    name, fails = module
    finders = list(sys.meta_path)
    seen = []
    when_imported(name, lambda each: seen.append(each.value))
    when_imported(name, lambda each: seen.append(each.__name__))
    assert importlib.util.find_spec(name) is not None and seen == []
    fails.touch()
    with pytest.raises(ValueError, match="not now"):
        importlib.import_module(name)
    assert seen == []
    fails.unlink()
    importlib.invalidate_caches()
    imported = importlib.import_module(name)
    assert sorted(seen, key=str) == [3, name]
    assert sys.meta_path == finders
    assert imported.__spec__.loader.get_source(name).endswith("value = 3\n")
    when_imported(name, lambda each: seen.append("at once"))
    assert seen[-1] == "at once" and sys.meta_path == finders


@pytest.mark.parametrize(
    "imports",
    [
        "import torchweld, transformers",
        "from transformers import LlamaForCausalLM; import torchweld, transformers",
    ],
)
def test_attention_is_there_in_any_order_of_imports(imports):
    pytest.importorskip("transformers")
    code = """
    import torch
    {imports}
    settings = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config = transformers.LlamaConfig(**settings, num_attention_heads=4)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="torchweld")
    from torchweld.integrations import hf_attention
    from torch.utils._python_dispatch import TorchDispatchMode
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            print(op)
            return op(*args, **(kwargs or {{}}))
    with torch.no_grad(), Seen():
        model(torch.tensor([[5, 3, 7]]))
    """
    assert "torchweld.attention.default" in run_python(code.format(imports=imports))


@pytest.mark.parametrize("name", ["gpt2", "hf_attention", "hf_mask", "hf_models", "hf_switch"])
def test_any_of_the_integrations_may_be_the_first_to_import_transformers(name):
    pytest.importorskip("transformers")
    code = f"""
    import torchweld.integrations.{name}
    import transformers
    print("torchweld" in transformers.AttentionInterface())
    """
    assert run_python(code) == "True\n"


def test_import_of_torchweld_leaves_transformers_alone():
    assert (
        run_python("import sys, torchweld; print([m for m in sys.modules if 'transformers' in m])")
        == "[]\n"
    )


def test_a_transformers_that_is_too_old_only_warns(monkeypatch):
    pytest.importorskip("transformers.modeling_utils")
    from torchweld.integrations import hf_attention, hf_register

    def register() -> None:
        raise ImportError("it is too old")

    monkeypatch.setattr(hf_attention, "register_attention", register)
    with pytest.warns(UserWarning, match='"torchweld" is not there, because it is too old'):
        hf_register.install()


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
    """Whether the packages that torchweld serves are imported before or after."""
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
