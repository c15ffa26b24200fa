"""Every bad call of every op is refused in one sentence that names the op and the argument.

So are those that never reach an op: keywords of other libraries, lists and callables, and wrong
modules for `from_torch` and `fuse`.
"""

from __future__ import annotations

import inspect
import re
import typing

import numpy as np
import pytest
import torch
from torch import nn

import samples
import torchweld
from refusals import SPECS, cases
from samples import DIFFERENTIABLE, PUBLIC


@pytest.mark.parametrize("op", SPECS)
def test_bad_calls(op, device):
    few = {"int4_pack": 10, "int4_unpack": 15, "add_scalar": 18, "outer_add_backward": 21}
    assert len(cases(op)) >= few.get(op, 25)
    for case in cases(op):
        case.check(device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has float64")
@pytest.mark.parametrize(
    "op", ["add_scalar", "causal_softmax", "row_sum", "scalar_attention", "softmax"]
)
def test_float64_on_a_gpu(op):
    args, kwargs = samples.SAMPLES[op][0].make("cuda", torch.float64)
    with pytest.raises(RuntimeError, match=f"^torchweld::{op}: (q|scores|x) must be"):
        samples.call(op)(*args, **kwargs)


@pytest.mark.parametrize("name", torchweld.nn.__all__)
def test_unknown_keyword_of_a_constructor(name):
    module = getattr(torchweld.nn, name)
    arguments = list(inspect.signature(module).parameters)
    longest = max(arguments, key=len)
    with pytest.raises(TypeError) as error:
        module(**{f"{longest}_": 1})
    assert str(error.value) == (
        f"torchweld.nn.{name}: arguments must be {', '.join(arguments)}, but got {longest}_; use "
        f"{longest}="
    )


@pytest.mark.parametrize("op", [op for op in SPECS if op in DIFFERENTIABLE])
def test_bad_call_while_recording(op, device):
    """The refusal names the op that was called, not the one that autograd calls for it."""
    for case in cases(op):
        case.check(device, recorded=True)


Q, X, WEIGHT = torch.ones(2, 3, 5, 8), torch.ones(4, 8), torch.ones(16, 8)
TARGET = torch.zeros(4, dtype=torch.int64)
MASK = torch.ones(2, 5, dtype=torch.int64)
ATTENTION = (
    "arguments must be query, key, value, leftpad, causal, scale, key_start, key_end, window, "
    "softcap, sink, dropout_p, dropout_seed, bias, alibi_slopes, but got"
)
FROM_MASK = "torchweld.leftpad_from_mask(attention_mask)"
LAST_DIM = "leave it out, the last dim is meant; for another one use x.movedim(dim, -1)"
LIKE_LINEAR = ("linear", "layer_norm_linear", "rms_norm_linear")
# The arguments of an op's function, and the sentence after "torchweld::<op>: ".
SENTENCES = [
    # Keywords of torch and of other libraries.
    ("attention", [Q] * 3, {"is_causal": True}, f"{ATTENTION} is_causal; use causal=, which is "
     "aligned at the bottom right"),
    ("attention", [Q] * 3, {"dropout": 0.1}, f"{ATTENTION} dropout; use dropout_p="),
    ("attention", [Q] * 3, {"attn_mask": MASK}, f"{ATTENTION} attn_mask; masks are numbers: use "
     f"leftpad={FROM_MASK}, or key_start=, key_end=, window="),
    ("attention", [Q] * 3, {"sliding_window": 4}, f"{ATTENTION} sliding_window; use window="),
    ("attention", [Q] * 3, {"s_aux": X}, f"{ATTENTION} s_aux; use sink="),
    ("attention", [Q] * 3, {"softmax_scale": 1.0}, f"{ATTENTION} softmax_scale; use scale="),
    ("attention", [Q] * 3, {"window_size": (3, 0)}, f"{ATTENTION} window_size; use window=left + "
     "1, or torchweld.compat.flash_attn for other right sizes"),
    ("attention", [Q] * 3, {"return_attn_probs": True}, f"{ATTENTION} return_attn_probs; use "
     "torchweld.attention_with_lse"),
    ("attention", [Q, Q[:, :2], Q[:, :2]], {}, "key must be (batch, nheads_kv, seqlen_k, head_dim) "
     "with nheads_kv a divisor of nheads = 3, but got nheads_kv = 2; if heads come after the "
     "tokens use .transpose(1, 2)"),
    ("attention", [Q] * 3, {"caussal": True}, f"{ATTENTION} caussal; use causal="),
    ("attention", [Q] * 3, {"flavour": 1}, f"{ATTENTION} flavour"),
    ("attention", [Q] * 5, {}, f"{ATTENTION} 5 without a name; use causal=, scale=, key_start=, "
     "key_end=, window=, softcap=, sink=, dropout_p=, dropout_seed=, bias=, alibi_slopes="),
    ("softmax", [X], {"dim": 0}, f"arguments must be x, but got dim; {LAST_DIM}"),
    ("softmax", [X, 0], {}, f"arguments must be x, but got 2 without a name; {LAST_DIM}"),
    ("softmax", [X], {"dtype": torch.float64}, "arguments must be x, but got dtype; use "
     "x.to(dtype)"),
    ("row_sum", [X], {"axis": 0}, f"arguments must be x, but got axis; {LAST_DIM}"),
    ("linear", [X, WEIGHT], {"approximate": "tanh"}, "arguments must be x, weight, bias, "
     'activation, but got approximate; use activation="gelu_tanh"'),
    ("gated_linear", [X, WEIGHT], {"approximate": "tanh"}, "arguments must be x, weight, bias, "
     'gate, interleaved, but got approximate; use gate="geglu_tanh"'),
    ("gated_linear", [X, WEIGHT], {"activation": "silu"}, "arguments must be x, weight, bias, "
     'gate, interleaved, but got activation; use gate=, as "swiglu" = silu(left) * right'),
    *[("linear_cross_entropy", [X, WEIGHT, TARGET], {name: 1.0}, "arguments must be x, weight, "
       "target, bias, reduction, ignore_index, label_smoothing, softcap, z_loss, shift, "
       f"temperature, keep, but got {name}; use {ours}=")
      for name, ours in (("input", "x"), ("labels", "target"), ("options", "keep"),
                         ("linear_weight", "weight"), ("linear_bias", "bias"),
                         ("lse_square_scale", "z_loss"), ("logit_softcapping", "softcap"))],
    ("cross_entropy", [X, TARGET], {"class_weights": X}, "arguments must be logits, target, "
     "reduction, ignore_index, label_smoothing, softcap, z_loss, shift, temperature, but got "
     "class_weights; use reduction='none' and multiply by class_weights[target]"),
    ("cross_entropy", [X, TARGET], {"weight": X}, "arguments must be logits, target, reduction, "
     "ignore_index, label_smoothing, softcap, z_loss, shift, temperature, but got weight; use "
     "reduction='none' and multiply by class_weights[target]"),
    ("gated_linear", [X, WEIGHT], {"right": WEIGHT}, "arguments must be x, weight, bias, gate, "
     "interleaved, but got right; use torchweld.gated_linear_pair for two weights"),
    ("softmax", [X], {"dropout_p": 0.0}, "arguments must be x, but got dropout_p"),
    ("bmm", [Q[0], Q[0]], {"dim": 1}, "arguments must be a, b, but got dim"),
    # Lists, arrays, callables, None.
    ("softmax", [[1.0, 2.0]], {}, "x must be a Tensor, but got list; use torch.as_tensor(x)"),
    ("linear", [X, np.ones((16, 8))], {}, "weight must be a Tensor, but got ndarray; use "
     "torch.as_tensor(weight)"),
    ("linear", [X, None], {}, "weight must be a Tensor, but got None"),
    ("attention", [Q, Q, Q, [0, 1]], {}, "leftpad must be a Tensor, but got list; use "
     "torch.as_tensor(leftpad, dtype=torch.int32)"),
    ("attention", [Q] * 3, {"causal": "yes"}, "causal must be a bool, but got 'yes'"),
    ("attention", [Q] * 3, {"scale": torch.ones(2)}, "scale must be a float, but got Tensor; "
     "use scale.item()"),
    ("linear", [X, WEIGHT], {"activation": torch.relu}, "activation must be a str, but got relu; "
     "use its name"),
    ("gated_linear", [X, WEIGHT], {"gate": nn.GELU()}, "gate must be a str, but got GELU; use "
     "its name"),
    ("int4_unpack", [X, 8.5], {}, "cols must be an int, but got 8.5"),
    # The op itself refuses masks in place of left pads, and weights in GPT-2's layout.
    ("attention", [Q, Q, Q, MASK], {}, "leftpad must be int32 (2,) on cpu, but got int64 (2, 5) "
     f"on cpu; use {FROM_MASK}"),
    ("causal_softmax", [Q[:, 0, :, :5], MASK > 0], {}, "leftpad must be int32 (2,) on cpu, but "
     f"got bool (2, 5) on cpu; use {FROM_MASK}"),
    ("attention", [Q, Q, Q, MASK[:, 0]], {}, "leftpad must be int32 (2,) on cpu, but got int64 "
     "(2,) on cpu; use leftpad.to(query.device, torch.int32)"),
    *[(op, [X, WEIGHT.t()], {}, "weight must be (N, K) with K = 8, but got float32 (8, 16) on "
       "cpu; use weight.t()") for op in LIKE_LINEAR],
    *[(op, [X, WEIGHT[:, 1:]], {}, "weight must be (N, K) with K = 8, but got float32 (16, 7) on "
       "cpu") for op in LIKE_LINEAR],
    ("gated_linear", [X, WEIGHT.t()], {}, "weight must be (2N, K) with K = 8 and an even number "
     "of rows, but got float32 (8, 16) on cpu; use weight.t()"),
    # The layouts of other libraries: two weights of a gated layer, classes in dim 1.
    ("gated_linear", [X, WEIGHT, WEIGHT], {}, "bias must be (2N,) = (16,), but got float32 (16, 8) "
     "on cpu; use torchweld.gated_linear_pair for two weights"),
    ("gated_linear", [X, WEIGHT[:5], WEIGHT[:5]], {}, "weight must be (2N, K) with K = 8 and an "
     "even number of rows, but got float32 (5, 8) on cpu; use torchweld.gated_linear_pair for two "
     "weights"),
    ("cross_entropy", [Q, torch.zeros(2, 5, 8, dtype=torch.int64)], {}, "target must be the "
     "leading dims of logits = (2, 3, 5), but got int64 (2, 5, 8) on cpu; the classes are the last "
     "dim, use logits.movedim(1, -1)"),
    ("folded_layer_norm_linear", [X, WEIGHT.t(), torch.ones(8)], {}, "folded_weight must be "
     "(N, K) with K = 8, but got float32 (8, 16) on cpu; use folded_weight.t()"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "kwargs", "sentence"), SENTENCES)
def test_sentence(op, args, kwargs, sentence):
    with pytest.raises((TypeError, RuntimeError)) as error:
        getattr(torchweld, op)(*args, **kwargs)
    assert str(error.value) == f"torchweld::{op}: {sentence}"


@pytest.mark.parametrize("op", [op for op in PUBLIC if hasattr(torchweld, op)])
def test_types_list_the_names_that_an_op_takes(op):
    function = getattr(torchweld, op)
    args, kwargs = samples.SAMPLES[op][0].make("cpu")
    for name, hint in typing.get_type_hints(function).items():
        assert hint is not str
        if typing.get_origin(hint) is typing.Literal:
            with pytest.raises(RuntimeError, match=f"{name} must be ") as error:
                function(*args, **{**kwargs, name: "?"})
            listed = str(error.value).partition(" must be ")[2].partition(", but got")[0]
            names = re.findall(r"\w+", listed.removeprefix("one of ").replace(" or ", " "))
            assert names == list(typing.get_args(hint))


@pytest.mark.parametrize(
    ("name", "activation", "gate"),
    [
        ("gelu_new", "'gelu_tanh'", "'geglu_tanh' = left * gelu_tanh(right)"),
        ("gelu_pytorch_tanh", "'gelu_tanh'", "'geglu_tanh' = left * gelu_tanh(right)"),
        ("swish", "'silu'", "'swiglu' = silu(left) * right"),
        ("SiLU", "'silu'", "'swiglu' = silu(left) * right"),
        ("tanh", None, None),
    ],
)
def test_activations_and_gates_of_other_libraries(name, activation, gate):
    calls = [
        ("activation", activation, lambda: torchweld.linear(X, WEIGHT, activation=name)),
        ("activation", activation, lambda: torchweld.nn.LayerNormLinear(8, 8, activation=name)),
        ("gate", gate, lambda: torchweld.gated_linear(X, WEIGHT, gate=name)),
        ("gate", gate, lambda: torchweld.gated_activation(X, X, gate=name)),
        ("gate", gate, lambda: torchweld.nn.GatedLinear(8, 8, gate=name)),
    ]
    for argument, fix, call in calls:
        with pytest.raises((RuntimeError, ValueError)) as error:
            call()
        head, _, end = str(error.value).partition(f", but got {name!r}")
        assert f": {argument} must be one of " in head
        assert end == (f"; use {fix}" if fix else "")


@pytest.mark.parametrize(
    ("op", "args", "idle"),
    [
        ("attention", [Q] * 3, {"attn_mask": None, "dropout": 0.0}),
        ("attention_with_lse", [Q] * 3, {"attn_bias": None, "dropout": 0}),
        ("cross_entropy", [X, TARGET], {"weight": None}),
    ],
)
def test_arguments_of_other_libraries_that_ask_for_nothing(op, args, idle):
    function = getattr(torchweld, op)
    compiled = torch.compile(lambda *a: function(*a, **idle), fullgraph=True, backend="eager")
    want = function(*args)
    for got in (function(*args, **idle), compiled(*args)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("op", [op for op in PUBLIC if hasattr(torchweld, op)])
def test_every_function_names_what_it_can_not_take(op):
    function = getattr(torchweld, op)
    args, kwargs = samples.SAMPLES[op][0].make("cpu")
    function(*args, **kwargs)
    first = next(iter(inspect.signature(function).parameters))
    with pytest.raises(TypeError) as error:
        function({}, *args[1:], **kwargs)
    assert str(error.value) == f"torchweld::{op}: {first} must be a Tensor, but got dict"
    with pytest.raises(TypeError) as error:
        function(*args, **kwargs, nonsense=1)
    assert re.fullmatch(
        rf"torchweld::{op}: arguments must be {first}\b[\w, ]*, but got nonsense", str(error.value)
    )


def test_a_missing_argument_is_named_by_python():
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'key' and"):
        torchweld.attention(Q)


NORM, LINEAR = nn.LayerNorm(8), nn.Linear(8, 16)


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("LayerNormLinear", LINEAR, "module must be nn.Sequential(LayerNorm((K,)), Linear("),
        (
            "LayerNormLinear",
            [NORM, LINEAR],
            "module must be nn.Sequential(LayerNorm((K,)), Linear(",
        ),
        ("RMSNormLinear", LINEAR, "module must be nn.Sequential(RMSNorm((K,)), Linear("),
        ("FoldedLayerNormLinear", LINEAR, "module must be LayerNormLinear or nn.Sequential("),
        ("GatedLinear", NORM, "module must be nn.Linear with an even out_features"),
        ("CausalSelfAttention", LINEAR, "module must be transformers' GPT2Attention"),
        ("Softmax", nn.ReLU(), "module must be nn.Softmax"),
        ("Int4Linear", NORM, "linear must be nn.Linear"),
    ],
)
def test_wrong_module(name, wrong, expected):
    with pytest.raises(ValueError) as error:
        getattr(torchweld.nn, name).from_torch(wrong)
    pattern = (
        rf"{name}\.from_(torch|linear): {re.escape(expected)}.*, but got {re.escape(str(wrong))}"
    )
    assert re.fullmatch(pattern, str(error.value))


@pytest.mark.parametrize("name", ["fuse", "unfuse"])
def test_model_that_is_none(name):
    pytest.importorskip("transformers")
    asked = f"torchweld.{name}: model must be an nn.Module, but got"
    for wrong, said in {
        "gpt2": "'gpt2'; use transformers.AutoModelForCausalLM.from_pretrained('gpt2')",
        None: "None",
        nn.Linear: "the class Linear",
        ("weight", X): "tuple",
    }.items():
        with pytest.raises(TypeError) as error:
            getattr(torchweld, name)(wrong)
        assert str(error.value) == f"{asked} {said}"


def test_mask_that_is_no_tensor():
    with pytest.raises(TypeError) as error:
        torchweld.leftpad_from_mask([[0, 1]])
    assert str(error.value) == (
        "leftpad_from_mask: attention_mask must be a Tensor, but got list; use "
        "torch.as_tensor(attention_mask)"
    )


def test_a_function_stays_what_it_was():
    """To help(), to TorchScript and to torch.compile."""
    assert list(inspect.signature(torchweld.softmax).parameters) == ["x"]
    assert torchweld.softmax.__doc__.startswith("Softmax over the last dimension")
    want = torch.softmax(X, -1)
    assert torch.equal(torch.jit.script(torchweld.softmax)(X), want)
    compiled = torch.compile(lambda x: torchweld.softmax(x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), want)


def other_tensors():
    """Tensors of X's values that are not dense, their kinds, and how they become so."""
    return {
        "sparse_coo": (X.to_sparse(), "x.to_dense()"),
        "sparse_csr": (X.to_sparse_csr(), "x.to_dense()"),
        "mkldnn": (X.to_mkldnn(), "x.to_dense()"),
        "quantised": (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "x.dequantize()"),
        "nested": (torch.nested.nested_tensor([X, X[:2]]), "torch.nested.to_padded_tensor(x, 0)"),
        "jagged": (
            torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged),
            "torch.nested.to_padded_tensor(x, 0)",
        ),
    }


@pytest.mark.filterwarnings("ignore")  # torch's, of layouts in beta
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "mkldnn", "quantised", "nested"])
def test_a_tensor_that_is_not_dense(kind):
    made = other_tensors()
    for given, fix in [made[kind]] + ([made["jagged"]] if kind == "nested" else []):
        sentence = f"x must be a dense Tensor, but got a {kind} one; use {fix}"
        for op, args in (("softmax", []), ("linear", [WEIGHT]), ("layer_norm_linear", [WEIGHT])):
            with pytest.raises(TypeError) as error:
                getattr(torchweld, op)(given, *args)
            assert str(error.value) == f"torchweld::{op}: {sentence}"
    with pytest.raises(TypeError, match="weight must be a dense Tensor, but got a sparse_coo one"):
        torchweld.linear(X, WEIGHT.to_sparse())


LOW = float("-inf")


@pytest.mark.parametrize(
    "row", [[0.0, 0.0, LOW, LOW], [LOW, LOW, 0.0, 0.0], [0.0] * 4, [1.0] * 4, [float("nan")] * 4]
)
@pytest.mark.parametrize("check", [True, False])
def test_leftpad_of_a_floating_mask(row, check):
    """An additive mask has zeros where another mask has ones; only the dtype distinguishes them."""
    with pytest.raises(ValueError) as error:
        torchweld.leftpad_from_mask(torch.tensor([row]), check=check)
    assert str(error.value) == (
        "leftpad_from_mask: attention_mask must be bool or integers, but got float32; use "
        "attention_mask.bool() for ones and zeros, attention_mask == 0 for an additive mask"
    )


@pytest.mark.parametrize("row", [[0, 0, -9, -9], [0, 1, 2, 2], [0, 0, 0, 255]])
def test_leftpad_of_a_mask_of_other_values(row):
    mask = torch.tensor([[0, 1, 1, 1], row])
    with pytest.raises(ValueError, match="other values in row 1; use attention_mask != 0 where"):
        torchweld.leftpad_from_mask(mask)
    assert torchweld.leftpad_from_mask(mask, check=False).tolist() == [1, 4]
