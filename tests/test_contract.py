"""The contract of every op, checked for every overload that the dispatcher lists."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import torchweld
from cuda_graphs import cuda_graph
from numerics import assert_same_bits, assert_same_kind, check
from running import REFERENCES
from samples import (
    AUTOCAST,
    BF16,
    DIFFERENTIABLE,
    F16,
    F32,
    F64,
    FLOAT32_RESULTS,
    OPS_OF_LISTS,
    PUBLIC,
    SAMPLES,
    TWICE_DIFFERENTIABLE,
    TWO_GRADIENTS,
    Sample,
    as_tuple,
    call,
    dtypes,
    each_call,
    forward_backward,
    has_kernel,
    need_kernel,
    requiring,
    sample,
    trained,
)
from torchweld.info import ops_of_library

OPS = list(SAMPLES)
ALL = [s for op in OPS for s in SAMPLES[op]]
FIRST = [SAMPLES[op][0] for op in OPS]


def form(s: Sample) -> tuple:
    """Returns a key that is equal for calls that are traced alike.

    For a public op it has the types of the arguments, and whether a tensor is empty. An op that
    only other ops call is a part of their graphs: all of its calls have one key.
    """
    if s.op not in PUBLIC:
        return (s.op,)
    args, kwargs = s.make()
    empty = any(a.numel() == 0 for a in args if isinstance(a, Tensor))
    return s.op, empty, *map(type, args), *((name, type(value)) for name, value in kwargs.items())


# The first sample of every form.
FORMS = list({form(s): s for op in OPS for s in reversed(SAMPLES[op])}.values())
DIFF = [s for op in DIFFERENTIABLE for s in SAMPLES[op]]
DIFF_FIRST = [SAMPLES[op][0] for op in DIFFERENTIABLE]
BACKWARD = [SAMPLES[op][0] for op in OPS if op.endswith("_backward")]


def each_alone(chosen: Iterable[Sample]) -> pytest.MarkDecorator:
    """A case of pytest for each sample, for tests whose compilations must not count together."""
    return pytest.mark.parametrize("s", [pytest.param(s, id=s.id) for s in chosen])


# Their gradients need no tensor of the forward call.
SAVES_NOTHING = ("row_sum", "add_scalar", "outer_add")

QKV = "Tensor query, Tensor key, Tensor value"
# Masks as numbers.
NUMBERS = (
    "Tensor? key_start=None, Tensor? key_end=None, int? window=None, float? softcap=None, "
    "Tensor? sink=None"
)
EXTRAS = (
    "float dropout_p=0.0, Tensor? dropout_seed=None, Tensor? bias=None, Tensor? alibi_slopes=None"
)
LOSS = (
    "Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, "
    'str reduction="mean", int ignore_index=-100, float label_smoothing=0, float? softcap=None, '
    "float z_loss=0, int shift=0, float temperature=1.0"
)
MLP = (
    "Tensor x, Tensor left, Tensor right, Tensor down, Tensor? left_bias=None, "
    'Tensor? right_bias=None, Tensor? down_bias=None, *, str gate="swiglu"'
)
EXPERTS = (
    "Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weight, "
    "Tensor? gate_up_bias=None, Tensor? down_bias=None, *, "
)
GROUPS = "Tensor x, Tensor weight, Tensor offsets, Tensor? bias=None, *"
GROUPED_GATE = 'str gate="swiglu", bool interleaved=False'
EXPERT_GATES = (
    'str gate="swiglu", float? limit=None, float? alpha=None, bool interleaved=False, '
    "bool transposed=False"
)
LOGITS = "Tensor logits, Tensor target, " + LOSS[LOSS.index("*") :]
# The contract with users: names, order and defaults.
SCHEMAS = [
    "softmax(Tensor x) -> Tensor",
    "softmax_backward(Tensor dy, Tensor y) -> Tensor",
    f"causal_softmax(Tensor scores, Tensor? leftpad=None, *, float scale=1.0, {NUMBERS}) -> Tensor",
    "causal_softmax_backward(Tensor dy, Tensor y, Tensor? leftpad=None, *, float scale=1.0, "
    f"{NUMBERS}, Tensor? scores=None) -> (Tensor dscores, Tensor dsink)",
    "softmax_matmul(Tensor scores, Tensor value, Tensor? leftpad=None, *, bool causal=False, "
    f"float scale=1.0, {NUMBERS}) -> Tensor",
    "softmax_matmul_forward(Tensor scores, Tensor value, Tensor? leftpad=None, *, "
    f"bool causal=False, float scale=1.0, {NUMBERS}) -> (Tensor out, Tensor lse)",
    "softmax_matmul_backward(Tensor dout, Tensor scores, Tensor value, Tensor out, Tensor lse, "
    f"Tensor? leftpad=None, *, bool causal=False, float scale=1.0, {NUMBERS}) -> "
    "(Tensor dscores, Tensor dvalue, Tensor dsink)",
    f"attention({QKV}, Tensor? leftpad=None, *, bool causal=False, float? scale=None, "
    f"{NUMBERS}, {EXTRAS}) -> Tensor",
    f"attention_forward({QKV}, Tensor? leftpad=None, *, bool causal=False, float? scale=None, "
    f"{NUMBERS}, {EXTRAS}) -> (Tensor out, Tensor lse)",
    f"attention_with_lse({QKV}, Tensor? leftpad=None, *, bool causal=False, float? scale=None, "
    f"{NUMBERS}, {EXTRAS}) -> (Tensor out, Tensor lse)",
    f"attention_backward(Tensor dout, {QKV}, Tensor out, Tensor lse, Tensor? leftpad=None, *, "
    f"bool causal=False, float? scale=None, {NUMBERS}, {EXTRAS}, Tensor? dlse=None, "
    "bool bias_requires_grad=True) -> "
    "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsink, Tensor dbias)",
    'linear(Tensor x, Tensor weight, Tensor? bias=None, *, str activation="none") -> Tensor',
    'linear_forward(Tensor x, Tensor weight, Tensor? bias=None, *, str activation="none") -> '
    "(Tensor y, Tensor preact)",
    "linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? preact=None, *, "
    'str activation="none", bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)',
    "layer_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? ln_weight=None, "
    'Tensor? ln_bias=None, *, float eps=1e-5, str activation="none") -> Tensor',
    "layer_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
    "Tensor? ln_weight=None, Tensor? ln_bias=None, *, float eps=1e-5, "
    'str activation="none") -> (Tensor y, Tensor preact, Tensor mean, Tensor rstd)',
    "layer_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? ln_weight, "
    "Tensor? ln_bias, Tensor mean, Tensor rstd, Tensor? preact=None, *, "
    'str activation="none", bool[5] output_mask) -> '
    "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)",
    "rms_norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, *, "
    'float eps=1e-6, float weight_offset=0, str activation="none") -> Tensor',
    "rms_norm_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, "
    "Tensor? norm_weight=None, *, float eps=1e-6, float weight_offset=0, "
    'str activation="none") -> (Tensor y, Tensor preact, Tensor rstd)',
    "rms_norm_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? norm_weight, "
    'Tensor rstd, Tensor? preact=None, *, float weight_offset=0, str activation="none", '
    "bool[4] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dnorm_weight)",
    "rms_norm_linears(Tensor x, Tensor[] weights, Tensor[]? biases=None, "
    "Tensor? norm_weight=None, *, float eps=1e-6, float weight_offset=0) -> Tensor[]",
    "rms_norm_linears_forward(Tensor x, Tensor[] weights, Tensor[]? biases=None, "
    "Tensor? norm_weight=None, *, float eps=1e-6, float weight_offset=0) -> Tensor[]",
    "rms_norm_linears_backward(Tensor[] dys, Tensor x, Tensor[] weights, Tensor? norm_weight, "
    "Tensor rstd, bool[4] output_mask, *, float weight_offset=0) -> Tensor[]",
    "layer_norm_linears(Tensor x, Tensor[] weights, Tensor[]? biases=None, Tensor? ln_weight=None, "
    "Tensor? ln_bias=None, *, float eps=1e-5) -> Tensor[]",
    "layer_norm_linears_forward(Tensor x, Tensor[] weights, Tensor[]? biases=None, "
    "Tensor? ln_weight=None, Tensor? ln_bias=None, *, float eps=1e-5) -> Tensor[]",
    "layer_norm_linears_backward(Tensor[] dys, Tensor x, Tensor[] weights, Tensor? ln_weight, "
    "Tensor? ln_bias, Tensor mean, Tensor rstd, bool[5] output_mask) -> Tensor[]",
    "rms_norm_gated(Tensor x, Tensor gate, Tensor? weight=None, *, float eps=1e-6, bool "
    "gate_first=False) -> Tensor",
    "rms_norm_gated_forward(Tensor x, Tensor gate, Tensor? weight=None, *, float eps=1e-6, bool "
    "gate_first=False) -> (Tensor y, Tensor rstd)",
    "rms_norm_gated_backward(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, *, "
    "bool gate_first=False, bool[3] output_mask) -> (Tensor dx, Tensor dgate, Tensor dweight)",
    "rms_norm(Tensor x, Tensor? weight=None, *, float eps=1e-6, float weight_offset=0) -> Tensor",
    "rms_norm_forward(Tensor x, Tensor? weight=None, *, float eps=1e-6, float weight_offset=0) "
    "-> (Tensor y, Tensor rstd)",
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, *, float "
    "weight_offset=0, bool[2] output_mask) -> (Tensor dx, Tensor dweight)",
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, float eps=1e-6, float "
    "weight_offset=0) -> (Tensor normed, Tensor sum)",
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight=None, *, float eps=1e-6, "
    "float weight_offset=0) -> (Tensor normed, Tensor sum, Tensor rstd)",
    "add_rms_norm_backward(Tensor dnormed, Tensor sum, Tensor? weight, Tensor rstd, Tensor? "
    "dsum=None, *, float weight_offset=0, bool[2] output_mask) -> (Tensor dx, Tensor dweight)",
    "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps=1e-5) -> Tensor",
    "layer_norm_forward(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps=1e-5) -> "
    "(Tensor y, Tensor mean, Tensor rstd)",
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, *, "
    "bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *, "
    "float eps=1e-5) -> (Tensor normed, Tensor sum)",
    "add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, "
    "*, float eps=1e-5) -> (Tensor normed, Tensor sum, Tensor mean, Tensor rstd)",
    "add_layer_norm_backward(Tensor dnormed, Tensor sum, Tensor? weight, Tensor mean, Tensor "
    "rstd, Tensor? dsum=None, *, bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "fold_layer_norm(Tensor weight, Tensor? bias=None, Tensor? ln_weight=None, "
    "Tensor? ln_bias=None) -> (Tensor folded_weight, Tensor weight_sum, Tensor folded_bias)",
    "folded_layer_norm_linear(Tensor x, Tensor folded_weight, Tensor weight_sum, "
    'Tensor? folded_bias=None, *, float eps=1e-5, str activation="none") -> Tensor',
    "folded_layer_norm_linear_backward(Tensor dy, Tensor x, Tensor folded_weight, "
    "Tensor weight_sum, Tensor? folded_bias=None, *, float eps=1e-5, "
    'str activation="none") -> Tensor dx',
    'gated_activation(Tensor left, Tensor right, *, str gate="swiglu") -> Tensor',
    "gated_activation_backward(Tensor dy, Tensor left, Tensor right, *, "
    'str gate="swiglu", bool[2] output_mask) -> (Tensor dleft, Tensor dright)',
    "gated_linear(Tensor x, Tensor weight, Tensor? bias=None, *, "
    'str gate="geglu", bool interleaved=False) -> Tensor',
    "gated_linear_forward(Tensor x, Tensor weight, Tensor? bias=None, *, "
    'str gate="geglu", bool interleaved=False) -> (Tensor y, Tensor z)',
    "gated_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor z, *, "
    'str gate="geglu", bool interleaved=False, bool[3] output_mask) -> '
    "(Tensor dx, Tensor dweight, Tensor dbias)",
    "gated_linear_pair(Tensor x, Tensor left, Tensor right, Tensor? left_bias=None, "
    'Tensor? right_bias=None, *, str gate="swiglu") -> Tensor',
    "gated_linear_pair_forward(Tensor x, Tensor left, Tensor right, Tensor? left_bias=None, "
    'Tensor? right_bias=None, *, str gate="swiglu") -> (Tensor y, Tensor z)',
    "gated_linear_pair_backward(Tensor dy, Tensor x, Tensor left, Tensor right, Tensor z, *, "
    'str gate="swiglu", bool[5] output_mask) -> '
    "(Tensor dx, Tensor dleft, Tensor dright, Tensor dleft_bias, Tensor dright_bias)",
    f"gated_mlp({MLP}) -> Tensor",
    f"gated_mlp_forward({MLP}) -> (Tensor y, Tensor z)",
    "gated_mlp_backward(Tensor dy, Tensor x, Tensor left, Tensor right, Tensor down, Tensor z, "
    '*, str gate="swiglu", bool[7] output_mask) -> '
    "(Tensor dx, Tensor dleft, Tensor dright, Tensor ddown, Tensor dleft_bias, "
    "Tensor dright_bias, Tensor ddown_bias)",
    f"experts({EXPERTS}{EXPERT_GATES}) -> Tensor",
    f"experts_forward({EXPERTS}{EXPERT_GATES}) -> (Tensor y, Tensor z)",
    "experts_backward(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor "
    f"weight, Tensor z, Tensor? down_bias=None, *, {EXPERT_GATES}, bool[6] output_mask) -> "
    "(Tensor dx, Tensor dgate_up, Tensor ddown, Tensor dweight, Tensor dgate_up_bias, "
    "Tensor ddown_bias)",
    f'grouped_linear({GROUPS}, str activation="none") -> Tensor',
    f'grouped_linear_forward({GROUPS}, str activation="none") -> (Tensor y, Tensor preact)',
    "grouped_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor offsets, Tensor? "
    'preact=None, *, str activation="none", bool[3] output_mask) -> '
    "(Tensor dx, Tensor dweight, Tensor dbias)",
    f"grouped_gated_linear({GROUPS}, {GROUPED_GATE}) -> Tensor",
    f"grouped_gated_linear_forward({GROUPS}, {GROUPED_GATE}) -> (Tensor y, Tensor z)",
    "grouped_gated_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor offsets, Tensor z, "
    f"*, {GROUPED_GATE}, bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    f"cross_entropy({LOGITS}) -> Tensor",
    f"cross_entropy_forward({LOGITS}) -> (Tensor loss, Tensor max, Tensor log_sum)",
    "cross_entropy_backward(Tensor dloss, "
    f"{LOGITS.replace('target,', 'target, Tensor max, Tensor log_sum,')}) -> "
    "Tensor dlogits",
    f"cross_entropy_gradients_forward({LOGITS}) -> (Tensor loss, Tensor dlogits)",
    "cross_entropy_gradients_backward(Tensor dloss, Tensor unit_dlogits) -> Tensor dlogits",
    f'linear_cross_entropy({LOSS}, str keep="auto") -> Tensor',
    f"linear_cross_entropy_forward({LOSS}) -> (Tensor loss, Tensor lse)",
    "linear_cross_entropy_backward(Tensor dloss, "
    f"{LOSS.replace('target,', 'target, Tensor lse,')}, Tensor? dlse=None, Tensor? dmean=None, "
    "bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    f"linear_cross_entropy_gradients_forward({LOSS}, bool[3] output_mask) -> "
    "(Tensor loss, Tensor dx, Tensor dweight, Tensor dbias)",
    "linear_cross_entropy_gradients_backward(Tensor dloss, Tensor unit_dx, Tensor unit_dweight, "
    "Tensor unit_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    f'linear_cross_entropy_exponentials_forward({LOSS}, str keep="exponentials", '
    "bool mean=False) -> (Tensor loss, Tensor lse, Tensor y, Tensor factor, Tensor mean)",
    "linear_cross_entropy_exponentials_backward(Tensor dloss, Tensor x, Tensor weight, "
    'Tensor target, Tensor y, Tensor factor, *, str reduction="mean", int ignore_index=-100, '
    "float label_smoothing=0, int shift=0, float temperature=1.0, bool[3] output_mask) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias)",
    "linear_token_logprobs(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, "
    "float temperature=1.0, float? softcap=None, bool entropy=False) -> "
    "(Tensor logprob, Tensor entropy)",
    "linear_token_logprobs_forward(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, "
    "float temperature=1.0, float? softcap=None, bool entropy=False) -> "
    "(Tensor logprob, Tensor row_entropy, Tensor lse)",
    "linear_token_logprobs_backward(Tensor dlogprob, Tensor x, Tensor weight, Tensor target, "
    "Tensor lse, Tensor? bias=None, Tensor? row_entropy=None, Tensor? dentropy=None, *, "
    "float temperature=1.0, float? softcap=None, bool[3] output_mask) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias)",
    "scalar_attention(Tensor q, Tensor k, Tensor v) -> Tensor",
    "scalar_attention_forward(Tensor q, Tensor k, Tensor v) -> (Tensor z, Tensor mean, Tensor sum)",
    "scalar_attention_backward(Tensor dz, Tensor q, Tensor k, Tensor v, Tensor mean, "
    "Tensor sum, *, bool[3] output_mask) -> (Tensor dq, Tensor dk, Tensor dv)",
    "add_scalar(Tensor x, float value) -> Tensor",
    "outer_add(Tensor x, Tensor y) -> Tensor",
    "outer_add_backward(Tensor dz) -> (Tensor dx, Tensor dy)",
    "outer_mul_relu(Tensor x, Tensor y) -> Tensor",
    "outer_mul_relu_backward(Tensor dz, Tensor x, Tensor y) -> (Tensor dx, Tensor dy)",
    "mul_relu(Tensor x, Tensor y) -> Tensor",
    "mul_relu_backward(Tensor dz, Tensor x, Tensor y) -> (Tensor dx, Tensor dy)",
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, *, str "
    'activation="none", Tensor? key_start=None) -> Tensor',
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? "
    'initial_state=None, *, str activation="none", Tensor? key_start=None, bool[4] output_mask) '
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)",
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False) -> "
    "(Tensor q_out, Tensor k_out)",
    "rotary_backward(Tensor dq_out, Tensor dk_out, Tensor cos, Tensor sin, *, "
    "bool interleaved=False, bool[2] output_mask) -> (Tensor dq, Tensor dk)",
    "row_sum(Tensor x) -> Tensor",
    "conv2d(Tensor x, Tensor weight) -> Tensor",
    "conv2d_backward(Tensor dz, Tensor x, Tensor weight, *, bool[2] output_mask) -> "
    "(Tensor dx, Tensor dweight)",
    "int4_pack(Tensor codes) -> Tensor",
    "int4_unpack(Tensor packed, SymInt cols) -> Tensor",
    "int4_repack(Tensor qweight, Tensor scale, Tensor zero) -> "
    "(Tensor packed, Tensor packed_scale, Tensor packed_zero)",
    "int4_linear(Tensor x, Tensor qweight, Tensor scale, Tensor zero, Tensor? bias=None) -> Tensor",
    "int4_linear_backward(Tensor dy, Tensor qweight, Tensor scale, Tensor zero) -> Tensor dx",
    "int4_linear_repacked(Tensor x, Tensor packed, Tensor packed_scale, Tensor packed_zero, "
    "Tensor? bias=None, *, SymInt out_features) -> Tensor",
    "int4_linear_repacked_backward(Tensor dy, Tensor packed, Tensor packed_scale, "
    "Tensor packed_zero, *, SymInt in_features) -> Tensor dx",
    "bmm(Tensor a, Tensor b) -> Tensor",
    "bmm_backward(Tensor dy, Tensor a, Tensor b, *, bool[2] output_mask) -> (Tensor da, Tensor db)",
]


def tensors(args) -> list[int]:
    return [i for i, a in enumerate(args) if isinstance(a, Tensor)]


def floats(args) -> list[int]:
    return [i for i in tensors(args) if args[i].is_floating_point()]


def argument_names(op: str) -> list[str]:
    return [a.name for a in call(op).default._schema.arguments]


def run(s, args, kwargs) -> list[Tensor]:
    """Outputs, and gradients where the op has them, as one flat list."""
    outputs = list(as_tuple(call(s.op)(*args, **kwargs)))
    if s.op not in DIFFERENTIABLE:
        return outputs
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(outputs[0].shape, generator=g, dtype=F64).to(outputs[0])
    _, grads = forward_backward(s.op, args, kwargs, dout)
    return outputs + [g for g in grads if g is not None]


def gradients(outputs, leaves) -> tuple[Tensor, ...]:
    """The gradients of the first result's sum."""
    out = as_tuple(outputs)[0]
    return torch.autograd.grad(out, trained(leaves), torch.ones_like(out))


def plain_gradients(op, args, kwargs) -> list[Tensor]:
    """The gradients of a plain call."""
    return [g for g in forward_backward(op, args, kwargs)[1] if g is not None]


# The list of ops


def test_every_registered_op_has_samples():
    assert set(ops_of_library()) == set(SAMPLES) | set(OPS_OF_LISTS)
    assert all(len(samples) >= 5 for samples in SAMPLES.values())


@pytest.mark.parametrize("text", SCHEMAS, ids=lambda t: t.split("(")[0])
def test_schema_is_the_documented_one(text):
    schema = torch._C.parse_schema("torchweld::" + text)
    actual = call(schema.name.removeprefix("torchweld::")).default._schema
    # The name of a single unnamed result is free.
    assert str(actual).split(" -> ")[0] == str(schema).split(" -> ")[0]
    if len(schema.returns) > 1:
        assert str(actual) == str(schema)
    assert len(actual.returns) == len(schema.returns)


def test_schemas_are_complete():
    assert sorted(t.split("(")[0] for t in SCHEMAS) == list(ops_of_library())


@pytest.mark.parametrize("op", PUBLIC)
def test_python_function_is_the_op(op):
    function = getattr(torchweld, op)
    parameters = list(inspect.signature(function).parameters.values())
    arguments = call(op).default._schema.arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for p, a in zip(parameters, arguments, strict=True):
        assert (p.kind is p.KEYWORD_ONLY) == a.kwarg_only, p.name
        assert (p.default is not p.empty) == a.has_default_value(), p.name
        if a.has_default_value():
            assert p.default == a.default_value, p.name
    assert function.__doc__ and "Args:" in function.__doc__ and "Returns:" in function.__doc__
    for s in SAMPLES[op]:
        args, kwargs = s.make()
        expected = as_tuple(call(op)(*args, **kwargs))
        assert_same_bits(as_tuple(function(*args, **kwargs)), expected, op)


# Results


@each_call(ALL)
def test_result_is_inside_its_bound(s, device):
    for dtype in dtypes(device):
        args, kwargs = s.make(device, dtype)
        outputs = as_tuple(call(s.op)(*args, **kwargs))
        returns = call(s.op).default._schema.returns
        bounds = REFERENCES[s.op](*args, **kwargs)
        for out, bound, r in zip(outputs, bounds, returns, strict=True):
            label = f"{s.op} {r.name}".strip()
            check(out, bound, label=label, device=device)


@each_call(ALL)
def test_rerun_is_bit_equal(s, device):
    for dtype in dtypes(device):
        args, kwargs = s.make(device, dtype)
        first = run(s, args, kwargs)
        assert_same_bits(run(s, args, kwargs), first, s.id)


@pytest.fixture
def poisoned_memory():
    """Fresh memory holds NaN, so an element that a kernel does not write is found."""
    was, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(was, warn_only=warn_only)


@each_call(ALL)
def test_every_output_is_written(s, device, poisoned_memory):
    assert torch.empty(1000, device=device).isnan().all()
    for dtype in dtypes(device):
        args, kwargs = s.make(device, dtype)
        poisoned = run(s, args, kwargs)
        torch.use_deterministic_algorithms(False)
        plain = run(s, args, kwargs)
        torch.use_deterministic_algorithms(True, warn_only=True)
        for out, ref in zip(poisoned, plain, strict=True):
            assert not out.isnan().any(), s.id
            assert_same_bits(out, ref, s.id)


@each_call(ALL)
def test_inputs_stay_and_outputs_are_fresh(s, device):
    args, kwargs = s.make(device)
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    versions = [a._version if isinstance(a, Tensor) else 0 for a in args]
    outputs = run(s, args, kwargs)
    for i in tensors(args):
        assert_same_bits(args[i], before[i], argument_names(s.op)[i])
        assert args[i]._version == versions[i]
    filled = [t for t in outputs if t.numel()]
    places = [t.untyped_storage().data_ptr() for t in filled]
    # One gradient goes to x and to the residual, as that of x + residual does.
    shared = s.op in ("add_rms_norm", "add_layer_norm") and args[0].numel() > 0
    assert len(set(places)) == len(places) - shared, "two outputs share memory"
    inputs = {args[i].untyped_storage().data_ptr() for i in tensors(args) if args[i].numel()}
    assert not inputs & set(places), "an output shares memory with an input"


# Layouts


def layouts(t: Tensor) -> dict[str, Tensor]:
    """Strides and offsets change nothing; NaN (a huge pad) fills the gaps."""
    hole = float("nan") if t.is_floating_point() else min(2**30, torch.iinfo(t.dtype).max)

    def buffer(*shape: int) -> Tensor:
        return torch.full(shape, hole, dtype=t.dtype, device=t.device)

    made = {}
    for offset in range(1, 9):
        made[f"offset {offset}"] = buffer(t.numel() + 16)[offset : offset + t.numel()].view(t.shape)
    if t.dim() == 0:
        return {}
    wide = (*t.shape[:-1], 2 * t.shape[-1] + 1)
    made["stepped"] = buffer(*wide)[..., 1::2]
    made["gapped"] = buffer(*t.shape[:-1], t.shape[-1] + 3)[..., 2:-1]
    if t.dim() > 1:
        made["transposed"] = buffer(*t.shape[:-2], t.shape[-1], t.shape[-2]).mT
        made["reversed dims"] = buffer(*reversed(t.shape)).permute(*reversed(range(t.dim())))
    return {name: view.copy_(t) for name, view in made.items()}


@each_call(ALL)
def test_strides_and_offsets_do_not_matter(s, device):
    for dtype in (F32, BF16):
        args, kwargs = s.make(device, dtype)
        plain = as_tuple(call(s.op)(*args, **kwargs))
        bounds = REFERENCES[s.op](*args, **kwargs)
        views = {i: layouts(args[i]) for i in tensors(args)}
        for name in sorted({name for v in views.values() for name in v}):
            moved = [views[i].get(name, a) if i in views else a for i, a in enumerate(args)]
            outputs = as_tuple(call(s.op)(*moved, **kwargs))
            for out, ref, bound in zip(outputs, plain, bounds, strict=True):
                # Another tier may sum in another order; the bound allows no more than that.
                check(out, bound, label=f"{s.op} of strided inputs")
                assert_same_kind(out, ref.shape, ref.dtype, f"{s.id}, {name}")


@each_call(DIFF)
def test_gradient_of_any_stride(s, device):
    args, kwargs = s.make(device)
    out = as_tuple(call(s.op)(*args, **kwargs))[0]
    one = torch.ones((), device=device).expand(out.shape)  # the gradient of out.sum()
    values = torch.randn(out.shape, device=device)
    for strided in [one, *layouts(values).values()]:
        plain = forward_backward(s.op, args, kwargs, strided.contiguous())[1]
        for got, ref in zip(forward_backward(s.op, args, kwargs, strided)[1], plain, strict=True):
            if ref is None:
                continue
            torch.testing.assert_close(got, ref, rtol=1e-5, atol=1e-6)


# Meta, fake tensors, compile, export, script


@each_alone(ALL)
def test_opcheck(s, device):
    """AOTAutograd, which takes most of the time, traces one sample of every form."""
    args, kwargs = s.make(device)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    utils += ["test_aot_dispatch_dynamic"] if s in FORMS else []
    torch.library.opcheck(
        call(s.op).default, tuple(requiring(s.op, args)), kwargs, test_utils=utils
    )


def significant(t: Tensor) -> list[int]:
    """The strides that decide the address of an element."""
    return [t.stride(d) for d in range(t.dim()) if t.numel() and t.shape[d] > 1]


@each_call(ALL)
def test_meta_and_fake_agree_with_real(s, device):
    for dtype in (F32, BF16):
        args, kwargs = s.make(device, dtype)
        transposed = [layouts(a).get("transposed", a) if isinstance(a, Tensor) else a for a in args]
        for call_args in (args, transposed):
            real = as_tuple(call(s.op)(*call_args, **kwargs))
            given = call_args, kwargs
            meta_args, meta_kwargs = tree_map_only(
                Tensor,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
                given,
            )
            with FakeTensorMode() as mode:
                fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, given)
                faked = as_tuple(call(s.op)(*fake_args, **fake_kwargs))
            for outputs, where in (
                (as_tuple(call(s.op)(*meta_args, **meta_kwargs)), "meta"),
                (faked, device),
            ):
                for got, ref in zip(outputs, real, strict=True):
                    assert got.shape == ref.shape and got.dtype == ref.dtype
                    assert significant(got) == significant(ref), s.id
                    assert got.device.type == where


def compiled_agrees(s, device, backend):
    args, kwargs = s.make(device)
    op = call(s.op)
    compiled = torch.compile(lambda *a: op(*a, **kwargs), fullgraph=True, backend=backend)
    assert_same_bits(compiled(*args), op(*args, **kwargs), s.id)
    if s.op not in DIFFERENTIABLE:
        return
    leaves = requiring(s.op, args)
    plain = plain_gradients(s.op, args, kwargs)
    assert_same_bits(gradients(compiled(*leaves), leaves), plain, s.id)


@each_alone(FORMS)
def test_compile_fullgraph(s, device):
    compiled_agrees(s, device, "eager")


@pytest.mark.parametrize("op", PUBLIC)
def test_compile_inductor(op, device):
    compiled_agrees(SAMPLES[op][0], device, "inductor")


# Which arguments and dims grow with the rows of the first argument.
LONGER = {
    **dict.fromkeys(("linear_cross_entropy", "linear_token_logprobs"), [(2, -1)]),  # targets
    "cross_entropy": [(1, -1)],
    **dict.fromkeys(("add_rms_norm", "add_layer_norm", "rms_norm_gated"), [(1, 0)]),
    **dict.fromkeys(("gated_activation", "mul_relu"), [(1, 0)]),
    "causal_softmax": [(0, -1)],
    "experts": [(3, 0), (4, 0)],
    "rotary": [(1, -2), (2, -2), (3, -2)],
    **dict.fromkeys(("scalar_attention", "causal_conv1d"), [(1, 0), (2, 0)]),
}


@pytest.mark.parametrize("op", PUBLIC)
def test_compile_with_dynamic_shapes(op, device):
    """One graph runs with another leading size."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(call(op), fullgraph=True, dynamic=True, backend=backend)
    for i in range(3):
        args, kwargs = SAMPLES[op][0].make(device)
        if op not in ("fold_layer_norm", "int4_repack"):
            of_x = (0, -2 if args[0].dim() > 1 else 0)
            for at, dim in (of_x, *LONGER.get(op, ())):
                args[at] = torch.cat([args[at]] * (i + 1), dim)
        out = as_tuple(compiled(*args, **kwargs))[0]
        assert_same_bits(out, as_tuple(call(op)(*args, **kwargs))[0], op)
    assert len(graphs) == 1


class Wrapped(torch.nn.Module):
    def __init__(self, op, kwargs):
        super().__init__()
        self.op, self.kwargs = op, kwargs

    def forward(self, *args):
        return self.op(*args, **self.kwargs)


@each_alone(FORMS)
def test_export(s, device):
    if any(a.numel() == 0 for a in s.make()[0] if isinstance(a, Tensor)):
        name = SAMPLES[s.op][0]
        assert name is not s, "the first sample of an op must not be empty"
        return  # export specialises on size 0: nothing beyond the compile test
    args, kwargs = s.make(device)
    program = torch.export.export(Wrapped(call(s.op), kwargs), tuple(args))
    assert any(f"torchweld.{s.op}" in str(n.target) for n in program.graph.nodes)
    again, _ = s.make(device, seed=5)
    expected = as_tuple(call(s.op)(*again, **kwargs))
    assert_same_bits(as_tuple(program.module()(*again)), expected, s.id)


def scripted_call(op, parameters, passed, tmp_path):
    """torch.jit.script of a function that calls the op."""
    path = tmp_path / f"call_{op}.py"
    path.write_text(
        "from typing import List, Optional\nimport torch\nfrom torch import Tensor\n\n\n"
        f"def call({parameters}):\n    return torch.ops.torchweld.{op}({passed})\n"
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return torch.jit.script(module.call)


def scripted(op, tmp_path):
    """torch.jit.script of a function that calls the op with every argument of its schema."""
    schema = call(op).default._schema
    names = {t: t for t in ("float", "bool", "int", "str", "Tensor")}

    def annotation(kind) -> str:
        text = str(kind)
        if text.startswith("Optional"):
            return f"Optional[{annotation(kind.getElementType())}]"
        return "List[bool]" if text.startswith("List") else names[text]

    parameters = ", ".join(f"{a.name}: {annotation(a.type)}" for a in schema.arguments)
    passed = ", ".join(f"{a.name}={a.name}" if a.kwarg_only else a.name for a in schema.arguments)
    script = scripted_call(op, parameters, passed, tmp_path)
    torch.jit.save(script, str(tmp_path / "call.pt"))
    return torch.jit.load(str(tmp_path / "call.pt"))


@pytest.mark.parametrize("op", OPS)
def test_script_saved_and_loaded(op, device, tmp_path):
    loaded = scripted(op, tmp_path)
    arguments = call(op).default._schema.arguments
    for s in SAMPLES[op]:
        args, kwargs = s.make(device)
        for a in arguments[len(args) :]:
            kwargs.setdefault(a.name, a.default_value if a.has_default_value() else None)
        leaves = requiring(op, args)
        got = as_tuple(loaded(*leaves, **kwargs))
        expected = as_tuple(call(op)(*args, **kwargs))
        assert_same_bits([t.detach() for t in got], expected, s.id)
        if op in DIFFERENTIABLE:
            assert_same_bits(gradients(got, leaves), plain_gradients(op, args, kwargs), s.id)


OPTIONAL_TENSORS = [
    (op, a.name)
    for op in OPS
    for a in call(op).default._schema.arguments
    if str(a.type) == "Optional[Tensor]"
]


def scripted_with_untyped(op, name, tmp_path):
    """torch.jit.script of a function whose parameter `name=None` has no type.

    TorchScript infers Tensor for it, so a call without it passes an undefined one. (torch cannot
    save any such function.)
    """
    arguments = [a for a in call(op).default._schema.arguments if a.name != name]
    parameters = ", ".join(f"{a.name}: {a.type}" for a in arguments)
    passed = ", ".join(f"{a.name}={a.name}" for a in arguments)
    return scripted_call(op, f"{parameters}, {name}=None", f"{passed}, {name}={name}", tmp_path)


def outcome(op, function, args, kwargs):
    """Results and gradients of a call, or the sentence that refuses it."""
    leaves = requiring(op, args)
    try:
        outputs = as_tuple(function(leaves, kwargs))
    except RuntimeError as error:
        (sentence,) = re.findall("torchweld::.*", str(error))
        return sentence
    grads = gradients(outputs, leaves) if trained(leaves) else ()
    return [t.detach() for t in (*outputs, *grads)]


@pytest.mark.parametrize(("op", "name"), OPTIONAL_TENSORS)
def test_an_undefined_tensor_counts_as_none(op, name, device, tmp_path):
    script = scripted_with_untyped(op, name, tmp_path)
    names = argument_names(op)
    defaults = {
        a.name: a.default_value if a.has_default_value() else None
        for a in call(op).default._schema.arguments
    }
    answered = 0
    for s in SAMPLES[op]:
        args, kwargs = s.make(device)
        at = names.index(name)
        args = [None if i == at else a for i, a in enumerate(args)]
        kwargs.pop(name, None)
        for autocast in (False, True):

            def scripted_call(leaves, kwargs):
                given = {**defaults, **dict(zip(names, leaves, strict=False)), **kwargs}
                del given[name]
                return script(**given)

            def plain_call(leaves, kwargs):
                return call(op)(*leaves, **kwargs)

            with torch.autocast(device, dtype=BF16, enabled=autocast):
                got = outcome(op, scripted_call, args, kwargs)
                expected = outcome(op, plain_call, args, kwargs)
            if isinstance(expected, str):
                assert got == expected
                continue
            answered += 1
            assert_same_bits(got, expected, s.id)
    assert answered > 0


# Autocast

FLOAT32_UNDER_AUTOCAST = ("weight_sum", "folded_bias")


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_autocast(op, dtype, device):
    for s in SAMPLES[op]:
        args, kwargs = s.make(device)
        names = argument_names(op)
        cast = [
            a.to(dtype)
            if i in floats(args) and op in AUTOCAST and names[i] not in FLOAT32_UNDER_AUTOCAST
            else a
            for i, a in enumerate(args)
        ]
        given = kwargs
        if op in AUTOCAST:
            given = {n: v.to(dtype) if floats([v]) else v for n, v in kwargs.items()}
        expected = as_tuple(call(op)(*cast, **given))
        keeps_dtype = op in AUTOCAST and op not in FLOAT32_RESULTS
        assert expected[0].dtype == (dtype if keeps_dtype else F32)
        leaves = requiring(op, args)
        with torch.autocast(device, dtype=dtype):
            plain = as_tuple(call(op)(*args, **kwargs))
            recorded = as_tuple(call(op)(*leaves, **kwargs))
        for outputs in (plain, recorded):
            assert_same_bits([t.detach() for t in outputs], expected, s.id)
        # Gradients arrive in the dtype of the leaves, with the values of the cast call.
        plain_grads = [g.to(F32) for g in plain_gradients(op, cast, given)]
        assert_same_bits(gradients(recorded, leaves), plain_grads, s.id)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_autocast_leaves_float64_alone(op):
    args, kwargs = SAMPLES[op][0].make("cpu", F64)
    with torch.autocast("cpu", dtype=BF16):
        out = as_tuple(call(op)(*args, **kwargs))
    assert_same_bits(out, as_tuple(call(op)(*args, **kwargs)), op)


@pytest.mark.parametrize("op", AUTOCAST)
def test_autocast_mends_mixed_dtypes(op, device):
    args, kwargs = SAMPLES[op][0].make(device)
    mixed = list(args)
    mixed[0] = args[0].to(BF16)
    with pytest.raises(RuntimeError, match=f"torchweld::{op}: \\w+ must be"):
        call(op)(*mixed, **kwargs)
    with torch.autocast(device, dtype=BF16):
        got, ref = call(op)(*mixed, **kwargs), call(op)(*args, **kwargs)
    assert_same_bits(as_tuple(got)[0], as_tuple(ref)[0], op)


# Gradients


@each_call(DIFF)
def test_gradcheck(s):
    args, kwargs = s.make("cpu", F64)
    transposed = [layouts(a).get("transposed", a) if isinstance(a, Tensor) else a for a in args]
    for call_args in (args, transposed):
        leaves = requiring(s.op, call_args)
        assert torch.autograd.gradcheck(
            lambda *a: as_tuple(call(s.op)(*a, **kwargs))[0], leaves, fast_mode=False
        )


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradcheck_of_ten_seeds(op):
    for seed in range(1, 11):
        args, kwargs = SAMPLES[op][0].make("cpu", F64, seed=seed)

        def first_output(*leaves, kwargs=kwargs):
            return as_tuple(call(op)(*leaves, **kwargs))[0]

        assert torch.autograd.gradcheck(first_output, requiring(op, args), fast_mode=True)


@each_call(DIFF)
def test_only_what_requires_a_gradient_gets_one(s, device):
    """One argument at a time; its gradient equals that of the full backward."""
    args, kwargs = s.make(device)
    _, full = forward_backward(s.op, args, kwargs)
    for i in DIFFERENTIABLE[s.op]:
        if i >= len(args) or args[i] is None:
            continue
        leaves = requiring(s.op, args, (i,))
        outputs = as_tuple(call(s.op)(*leaves, **kwargs))
        assert outputs[0].requires_grad
        has_gradient = [s.op in TWO_GRADIENTS and o.shape != (0,) for o in outputs[1:]]
        assert [o.requires_grad for o in outputs[1:]] == has_gradient
        (grad,) = torch.autograd.grad(outputs[0], leaves[i], torch.ones_like(outputs[0]))
        assert_same_bits(grad, full[i], s.id)


def recorded(s, device):
    """The inputs of a call that get a gradient, and its first output."""
    args, kwargs = s.make(device)
    leaves = requiring(s.op, args)
    return trained(leaves), as_tuple(call(s.op)(*leaves, **kwargs))[0]


@each_call(s for s in DIFF_FIRST if s.op not in TWICE_DIFFERENTIABLE)
def test_double_backward_raises(s, device):
    inputs, out = recorded(s, device)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="not implemented|not differentiable"):
            grad.sum().backward(retain_graph=True)


@each_call(BACKWARD)
def test_backward_op_has_no_gradient(s, device):
    args, kwargs = s.make(device)
    for i in floats(args):
        leaves = requiring(s.op, args, (i,))
        for out in as_tuple(call(s.op)(*leaves, **kwargs)):
            assert out.requires_grad
            with pytest.raises(RuntimeError, match="not implemented|not differentiable"):
                out.sum().backward()


def test_fold_layer_norm_has_no_gradient(device):
    need_kernel("fold_layer_norm", device)
    args, _ = sample("fold_layer_norm", "full").make(device)
    for i in range(4):
        leaves = requiring("fold_layer_norm", args, (i,))
        for out in torch.ops.torchweld.fold_layer_norm(*leaves):
            with pytest.raises(RuntimeError, match="not implemented|not differentiable"):
                out.sum().backward()


@each_call(DIFF)
def test_second_backward_is_bit_equal(s, device):
    inputs, out = recorded(s, device)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, inputs, dout), first, s.id)


@each_call(s for s in DIFF if s in DIFF_FIRST or "relu" in s.id or "pad" in s.id)
def test_in_place_edit_of_a_saved_tensor_raises(s, device):
    """Editing any argument, or the result, raises in backward or leaves the gradient as it was."""
    args, kwargs = s.make(device)
    before = plain_gradients(s.op, args, kwargs)
    raised = 0
    for edited in [*tensors(args), "out"]:
        leaves = requiring(s.op, [a.clone() if isinstance(a, Tensor) else a for a in args])
        out = as_tuple(call(s.op)(*leaves, **kwargs))[0]
        with torch.no_grad():
            (out.detach() if edited == "out" else leaves[edited]).add_(1)
        try:
            grads = gradients(out, leaves)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            raised += 1
            continue
        assert_same_bits(grads, before, f"{s.id}, edited {edited}")
    assert raised > 0 or s.op in SAVES_NOTHING


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_forward_mode_is_refused(op):
    """Forward mode raises; a tangent is never silently zero."""
    args, kwargs = SAMPLES[op][0].make()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        with pytest.raises(RuntimeError):
            call(op)(dual, *args[1:], **kwargs)


# Refusals that every op shares; the tables of bad calls are in test_<op>.py


@each_call(FIRST)
def test_wrong_dtype_names_the_argument(s, device):
    args, kwargs = s.make(device)
    names = argument_names(s.op)
    wrong = [torch.int64, torch.int32, torch.bool, torch.complex64, torch.complex128]
    for i in floats(args):
        for dtype in wrong:
            bad = [a.to(dtype) if j == i else a for j, a in enumerate(args)]
            with pytest.raises(RuntimeError) as error:
                call(s.op)(*bad, **kwargs)
            assert str(error.value).startswith(f"torchweld::{s.op}: {names[i]} must be"), error
    for i in floats(args)[1:]:
        if names[i] in ("logits", "unit_dlogits"):
            continue  # the others have the dtype of sums, also beside float16
        bad = [a.to(F16) if j == i else a for j, a in enumerate(args)]
        with pytest.raises(RuntimeError) as error:
            call(s.op)(*bad, **kwargs)
        text = str(error.value)
        assert text.startswith(f"torchweld::{s.op}: ") and "float16" in text, text
        # If the other arguments must be like this one, the error names them.
        assert f": {names[i]} must be" in text or f" like {names[i]}, but got" in text, text


@each_call(FIRST)
def test_mixed_devices_name_the_argument(s, device):
    args, kwargs = s.make(device)
    names = argument_names(s.op)
    for i in tensors(args) if len(tensors(args)) > 1 else []:
        bad = [a.to("meta") if j == i else a for j, a in enumerate(args)]
        with pytest.raises(RuntimeError) as error:
            call(s.op)(*bad, **kwargs)
        text = str(error.value)
        assert text.startswith(f"torchweld::{s.op}: "), text
        assert "meta" in text and any(f": {n} must be" in text for n in names), text


# CUDA

GPU = torch.cuda.is_available()
NO_GPU = [pytest.param(None, marks=pytest.mark.skip(reason="no GPU here"), id="no GPU")]
each_on_a_gpu = each_alone(ALL) if GPU else pytest.mark.parametrize("s", NO_GPU)


def test_every_op_has_a_kernel_or_says_that_the_build_has_none(device):
    for op in OPS:
        args, kwargs = SAMPLES[op][0].make(device)
        if has_kernel(device):
            call(op)(*args, **kwargs)
            continue
        with pytest.raises(NotImplementedError, match=f"torchweld::{op}: ") as error:
            call(op)(*args, **kwargs)
        assert "\n" not in str(error.value)


@each_on_a_gpu
def test_cuda_graph_replays_with_changed_inputs(s):
    need_kernel(s.op, "cuda")
    args, kwargs = s.make("cuda")
    graph, captured = cuda_graph(lambda: as_tuple(call(s.op)(*args, **kwargs)))
    for seed in range(1, 4):
        changed, _ = s.make("cuda", seed=seed)
        for i in tensors(args):
            args[i].copy_(changed[i])
        graph.replay()
        assert_same_bits(captured, as_tuple(call(s.op)(*changed, **kwargs)), s.id)


@pytest.mark.parametrize("trains", [False, True] if GPU else NO_GPU)
def test_compiled_cuda_graphs_share_no_memory_with_what_is_kept(trains):
    """Workspaces and counters are kept from call to call, outside of the graphs' pool."""
    need_kernel("attention", "cuda")
    ops = torch.ops.torchweld

    def matmuls(x, weight, back):
        return ops.linear(ops.linear(x, weight, activation="gelu"), back) + ops.row_sum(x)[:, None]

    def heads(x, weight, back):
        q = ops.linear(x, weight).view(2, -1, 8, 128).transpose(1, 2)
        decoded = ops.attention(q[:, :, -1:], q, q, causal=True)
        return ops.attention(q, q, q, causal=True) + decoded

    def tensors_of(seed):
        torch.manual_seed(seed)
        shapes = [(1024, 2048), (1024, 2048), (2048, 1024)]
        made = [torch.randn(*s, device="cuda", dtype=torch.bfloat16) / 32 for s in shapes]
        return [t.requires_grad_(trains) for t in made]

    def result(function, inputs):
        out = function(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True) if trains else ()
        return [out.detach().clone(), *(g.clone() for g in grads if g is not None)]

    functions = (matmuls, heads)
    compiled = [torch.compile(f, mode="reduce-overhead", fullgraph=True) for f in functions]
    for seed in range(4):
        inputs = tensors_of(seed)
        torch.compiler.cudagraph_mark_step_begin()
        for function, fast in zip(functions, compiled, strict=True):
            for got, want in zip(result(fast, inputs), result(function, inputs), strict=True):
                # Sums of several gradients are rounded in another order.
                assert (got - want).norm() <= 0.02 * want.norm(), function.__name__


@each_on_a_gpu
def test_cuda_stream_is_the_current_one(s):
    """The inputs are made behind a long wait on a second stream; the op must run after them."""
    need_kernel(s.op, "cuda")
    args, kwargs = s.make("cuda")
    expected = as_tuple(call(s.op)(*args, **kwargs))
    late = [torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for i in tensors(args):
            late[i].copy_(args[i])
        outputs = as_tuple(call(s.op)(*late, **kwargs))
    stream.synchronize()
    assert_same_bits(outputs, expected, s.id)


@each_on_a_gpu
def test_cuda_never_synchronises(s):
    need_kernel(s.op, "cuda")
    args, kwargs = s.make("cuda")
    out = as_tuple(call(s.op)(*args, **kwargs))[0]
    dout = torch.randn_like(out) if s.op in DIFFERENTIABLE else None
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(s.op)(*args, **kwargs)
        if s.op in DIFFERENTIABLE:
            forward_backward(s.op, args, kwargs, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
