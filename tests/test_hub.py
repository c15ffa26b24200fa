"""The folder of `make hub`, which Hugging Face's `kernels` loads."""

from __future__ import annotations

import copy
import inspect
import json
import platform
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import torchweld
from commands import python
from meshes import Names
from numerics import assert_same_bits
from torchweld._library import build_facts

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(torchweld.__file__).parent
RELEASE = "".join(torch.__version__.split(".")[:2])
# A wheel without kernels for a GPU is named after no CUDA.
CUDA = f"cu{torch.version.cuda.replace('.', '')}" if build_facts()["cuda"] else "cpu"
VARIANT = f"torch{RELEASE}-{CUDA}-{platform.machine()}-linux"
# The ops that record a gradient, of the norms and of the MLPs.
NORM, MLP = "torchweld::rms_norm_forward", "torchweld::gated_linear_pair_forward"
MISSING = "the package kernels is not installed; make test-hub installs it"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="wheels are for Linux")


def make_hub(folder: Path):
    return python(ROOT / "tools" / "hub.py", folder)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The folder that `make hub` makes of a wheel of the built library."""
    folder = tmp_path_factory.mktemp("checkout") / "dist"
    folder.mkdir()
    minor = ".".join(torch.__version__.split(".")[:2])
    name = f"torchweld-{torchweld.__version__}+torch{minor}.{CUDA}-py3-none-manylinux_2_28"
    with zipfile.ZipFile(folder / f"{name}_{platform.machine()}.whl", "w") as wheel:
        for path in ("_ops.abi3.so", "_build.json", "ops/stock.py"):
            wheel.write(PACKAGE / path, f"torchweld/{path}")
    done = make_hub(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"hub: {folder / 'hub'} ({VARIANT})\n"
    return folder / "hub"


def test_a_variant_has_the_library_the_layers_and_its_metadata(hub):
    variant = hub / "build" / VARIANT
    assert {path.name for path in variant.iterdir()} == {
        *("__init__.py", "_ops.abi3.so", "layers.py", "metadata.json", "stock.py")
    }
    metadata = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch(rf"_torchweld_{CUDA}_[0-9a-f]{{12}}", metadata["id"])
    facts = json.loads((PACKAGE / "_build.json").read_text())
    if CUDA == "cpu":
        assert metadata["backend"] == {"type": "cpu"}
    elif facts["arch_list"] == "9.0a 8.0+PTX":
        assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a", "8.0+PTX"]}


def test_a_folder_without_wheels_is_refused(tmp_path):
    (tmp_path / "torchweld-0.1.0-cp312-cp312-linux_x86_64.whl").touch()  # names no torch
    done = make_hub(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"hub: {tmp_path} has no wheel of torchweld; use make wheel\n"


LOAD = """
import importlib.util, sys, torch
def load():
    spec = importlib.util.spec_from_file_location("_torchweld_of_hub", sys.argv[1])
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


@pytest.mark.parametrize("first", ["kernel", "torchweld"])
def test_a_kernel_and_torchweld_load_in_one_process(hub, first):
    """Their ops have one namespace, and to register them twice would abort the process."""
    lines = ["load()", "import torchweld"]
    use = """
print(torchweld.softmax(torch.zeros(4)).tolist(), len(torch.ops.loaded_libraries))
"""
    code = LOAD + "\n".join(lines if first == "kernel" else lines[::-1]) + use
    done = python("-c", code, hub / "build" / VARIANT / "__init__.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0.25, 0.25, 0.25, 0.25] 1\n"


def llama(**options) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def kernelize(hub, monkeypatch):
    """Gives the forwards of the kernel to the modules of a model on the CPU."""
    kernels = pytest.importorskip("kernels", reason=MISSING)
    from transformers.activations import SiLUActivation
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # As transformers does. No kernel has a SiLU, so kernelize sets the stock forward on it.
    for name, stock in {"RMSNorm": LlamaRMSNorm, "MLP": LlamaMLP, "SiLU": SiLUActivation}.items():
        for attribute in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(stock, attribute, None, raising=False)  # undone after the test
        kernels.replace_kernel_forward_from_hub(stock, name)
    mapping = {
        name: {"cpu": kernels.LocalLayerRepository(hub, layer_name=name)}
        for name in ("RMSNorm", "MLP")
    }

    def kernelize(model: nn.Module, mode: str = "TRAINING") -> nn.Module:
        fallback = kernels.KernelizeFallback.NO_LAYER
        if mode == "TORCH_COMPILE":
            fallback |= kernels.KernelizeFallback.NO_COMPATIBLE_MODE
        mode = kernels.Mode.TRAINING | kernels.Mode[mode]
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            return kernels.kernelize(model, mode=mode, device="cpu", use_fallback=fallback)

    return kernelize


def run(model: nn.Module, **inputs: torch.Tensor) -> tuple[list[torch.Tensor], set[str]]:
    """The result of a model and its parameters' gradients, and the ops of the kernel that ran."""
    with Names() as names:
        out = model(**inputs)
        out = getattr(out, "logits", out)
        grads = torch.autograd.grad(out.square().mean(), list(model.parameters()))
    return [out, *grads], {NORM, MLP}.intersection(names)


TOKENS = torch.arange(14).view(2, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_kernelize_swaps_the_norms_and_the_mlps(kernelize, dtype, mlp_bias):
    stock = llama(mlp_bias=mlp_bias).to(dtype)
    expected, ran = run(stock, input_ids=TOKENS)
    assert not ran
    results, ran = run(kernelize(copy.deepcopy(stock)), input_ids=TOKENS)
    assert ran == {NORM, MLP}
    if dtype == torch.float32:
        assert_close(results, expected, rtol=1e-4, atol=1e-6)
        return
    exact, _ = run(stock.float(), input_ids=TOKENS)
    ours, eager, exact = (
        torch.cat([t.flatten().float() for t in tensors]) for tensors in (results, expected, exact)
    )
    assert (ours - exact).norm() <= 2 * (eager - exact).norm()


def with_hook(mlp: nn.Module) -> None:
    mlp.up_proj.register_forward_hook(lambda module, args, out: out + 1)


def with_hook_on_the_activation(mlp: nn.Module) -> None:
    mlp.act_fn.register_forward_hook(lambda module, args, out: out + 1)


def with_another_linear(mlp: nn.Module) -> None:
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    mlp.down_proj.__class__ = Shifted


@pytest.mark.parametrize(
    ("part", "options", "change", "dtype"),
    [
        ("mlp", {"hidden_act": "gelu"}, lambda mlp: None, torch.float32),
        ("mlp", {}, with_hook, torch.float32),
        ("mlp", {}, with_hook_on_the_activation, torch.float32),
        ("mlp", {}, with_another_linear, torch.float32),
        ("input_layernorm", {}, nn.Module.float, torch.bfloat16),
        ("input_layernorm", {}, nn.Module.double, torch.float64),
    ],
)
def test_what_a_layer_does_not_serve_runs_stock(kernelize, part, options, change, dtype):
    stock = getattr(llama(**options).model.layers[0], part)
    change(stock)
    x = {next(iter(inspect.signature(stock.forward).parameters)): torch.randn(2, 32, dtype=dtype)}
    results, ran = run(kernelize(copy.deepcopy(stock)), **x)
    assert not ran
    assert_same_bits(results, run(stock, **x)[0])


def test_a_compiled_model_keeps_its_stock_norms(kernelize):
    """torch.compile joins them with their neighbours."""
    stock = llama()
    model = kernelize(copy.deepcopy(stock), "TORCH_COMPILE")
    results, ran = run(torch.compile(model, backend="aot_eager", fullgraph=True), input_ids=TOKENS)
    assert ran == {MLP}
    assert_close(results, run(stock, input_ids=TOKENS)[0], rtol=1e-4, atol=1e-6)


def test_the_example_of_the_installation_page_runs(hub):
    pytest.importorskip("kernels", reason=MISSING)
    page = (ROOT / "docs" / "install.md").read_text()
    (example,) = re.findall(r"<!-- needs kernels -->\n```python\n(.*?)```", page, re.S)
    count = "print(sum('forward' in vars(module) for module in model.modules()))"
    env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PACKAGE.parent)}
    done = python("-c", example + count, cwd=hub.parent.parent, **env)
    assert done.stdout == "7\n", done.stderr  # 2 * 2 + 1 norms, 2 MLPs
