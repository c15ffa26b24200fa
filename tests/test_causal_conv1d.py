"""causal_conv1d and its gradient: the formula, documents, states, layouts."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import commands
import torchweld
from numerics import assert_equal, assert_same_bits
from samples import BF16, F32, F64, call, check_op, dtypes, forward_backward
from tensors import randn
from torchweld.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

op = torchweld.causal_conv1d
# Around 4 channels of a thread, a warp's 128, the 256 of a CPU task.
CHANNELS = (1, 3, 4, 5, 127, 128, 129, 132, 257)
# Around 8 rows in flight and the chunks of 16 and 64 positions on a GPU, 128 on a CPU.
SEQLENS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 64, 65, 128, 131)


def inputs(device, dtype, batch, channels, seqlen, width, state=False):
    """x as the transpose of a projection, weight, bias and perhaps a state."""
    x = randn(device, dtype, batch, seqlen, channels).transpose(1, 2)
    args = [x, randn(device, dtype, channels, width), randn(device, dtype, channels)]
    return args + [randn(device, dtype, batch, channels, width - 1)] * state


@pytest.mark.parametrize("channels", CHANNELS)
def test_channels(device, channels):
    for dtype, width in itertools.product(dtypes(device), (2, 3, 4)):
        check_op("causal_conv1d", inputs(device, dtype, 2, channels, 11, width))


@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize("state", [False, True])
def test_positions(device, seqlen, state):
    for dtype, activation in itertools.product(dtypes(device), ("none", "silu")):
        args = inputs(device, dtype, 2, 8, seqlen, 4, state)
        check_op("causal_conv1d", args, {"activation": activation})


def test_many_chunks(device):
    """More chunks than a block has, of sequences that end within a chunk."""
    for dtype in dtypes(device):
        check_op("causal_conv1d", inputs(device, dtype, 3, 36, 1100, 4), {"activation": "silu"})


def documents(device, batch, seqlen):
    """key_start of documents of 1, 2, 3, ... positions."""
    starts = [i for i in range(1, seqlen + 1) for _ in range(i)][:seqlen]
    starts = [i * (i - 1) // 2 for i in starts]
    return torch.tensor([starts] * batch, dtype=torch.int32, device=device)


def test_documents(device):
    for dtype in dtypes(device):
        args = inputs(device, dtype, 2, 12, 50, 4)
        options = {"activation": "silu", "key_start": documents(device, 2, 50)}
        check_op("causal_conv1d", args, options, eager=False)
        strided = options | {"key_start": options["key_start"].T.contiguous().T}
        assert_same_bits(op(*args, **strided), op(*args, **options))


def test_documents_are_those_of_single_calls(device):
    """To the bit, and NaN does not leave its document, forward or backward."""
    x, weight, bias = inputs(device, F32, 1, 12, 45, 4)
    x = x.clone()
    x[..., 6:10] = float("nan")  # the fourth document
    starts = documents(device, 1, 45)
    dout = torch.ones_like(x)
    y, grads = forward_backward("causal_conv1d", [x, weight, bias], {"key_start": starts}, dout)
    begins = [i * (i - 1) // 2 for i in range(1, 11)]
    for begin, end in itertools.pairwise(begins):
        alone, alone_grads = forward_backward(
            "causal_conv1d", [x[..., begin:end], weight, bias], {}, dout[..., begin:end]
        )
        assert_same_bits(y[..., begin:end], alone)
        assert_same_bits(grads[0][..., begin:end], alone_grads[0])


def test_positions_that_see_nothing(device):
    x, weight, bias = inputs(device, F32, 1, 4, 5, 3)
    starts = torch.full((1, 5), 9, dtype=torch.int32, device=device)
    y, grads = forward_backward(
        "causal_conv1d", [x, weight, bias], {"key_start": starts}, torch.ones_like(x)
    )
    assert_same_bits(y, bias[None, :, None].expand_as(y))
    for grad in grads[:2]:
        assert not grad.any()


@pytest.mark.parametrize("cut", [1, 2, 16, 30])
def test_a_state_continues_a_sequence(device, cut):
    for dtype in dtypes(device):
        x, weight, bias = inputs(device, dtype, 2, 20, 31, 4)
        whole = op(x, weight, bias, activation="silu")
        state = F.pad(x, (3, 0))[..., cut : cut + 3]
        rest = op(x[..., cut:], weight, bias, state, activation="silu")
        assert_same_bits(rest, whole[..., cut:])


def test_every_layout(device):
    """The result has the memory order of a projection, and the same bits."""
    for dtype in dtypes(device):
        x, weight, bias, state = inputs(device, dtype, 2, 12, 9, 4, state=True)
        expected = op(x, weight, bias, state)
        assert expected.transpose(1, 2).is_contiguous()
        wide = torch.empty(2, 9, 13, dtype=dtype, device=device)[..., 1:].transpose(1, 2).copy_(x)
        for rows in (x.contiguous(), wide, x.flip(0).flip(0)):
            assert_same_bits(op(rows, weight.T.contiguous().T, bias, state), expected)
        args = [
            x[:1].expand(2, 12, 9),
            weight,
            bias[:1].expand(12),
            state[..., :1].expand(2, 12, 3),
        ]
        check_op("causal_conv1d", args, eager=False)


def test_masks_of_the_backward(device):
    for dtype in (F32, BF16):
        args = inputs(device, dtype, 2, 12, 70, 4, state=True)
        dy = randn(device, dtype, 2, 12, 70)
        backward = call("causal_conv1d_backward")
        every = backward(dy, *args, activation="silu", output_mask=[True] * 4)
        for mask in itertools.product([False, True], repeat=4):
            grads = backward(dy, *args, activation="silu", output_mask=list(mask))
            for grad, full, wanted in zip(grads, every, mask, strict=True):
                assert_same_bits(grad, full if wanted else full.new_empty(0))


def test_threads_do_not_change_the_bits():
    args = inputs("cpu", F32, 2, 300, 300, 4)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(forward_backward("causal_conv1d", args, {}, torch.ones(2, 300, 300)))
    finally:
        torch.set_num_threads(threads)
    (y, grads), (again, grads_again) = results
    assert_same_bits(y, again)
    for grad, same in zip(grads, grads_again, strict=True):
        assert_same_bits(grad, same)


def test_the_convolution_of_models(device):
    """Written as transformers writes it for Mamba-2 and Qwen3-Next."""
    for dtype in {F32, F64} & set(dtypes(device)):
        x, weight, bias = inputs(device, dtype, 2, 16, 12, 4)
        conv = torch.nn.Conv1d(16, 16, 4, groups=16, padding=3).to(device, dtype)
        with torch.no_grad():
            conv.weight.copy_(weight[:, None])
            conv.bias.copy_(bias)
        expected = F.silu(conv(x)[..., :12])
        torch.testing.assert_close(
            op(x, conv.weight.squeeze(1), conv.bias, activation="silu"), expected
        )


def test_refusals(device):
    x, weight, bias, state = inputs(device, F32, 2, 8, 5, 4, state=True)
    starts = torch.zeros(2, 5, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=r"2 to 4, but got .*; use weight.squeeze\(1\)"):
        op(x, weight[:, None], bias)
    with pytest.raises(RuntimeError, match="weight must be .* a width of 2 to 4"):
        op(x, weight[:, :1])
    with pytest.raises(RuntimeError, match="initial_state must be given without key_start"):
        op(x, weight, bias, state, key_start=starts)
    with pytest.raises(RuntimeError, match="activation must be none or silu, but got 'gelu'"):
        op(x, weight, activation="gelu")
    with pytest.raises(RuntimeError, match=r"key_start must be \(batch, seqlen\) = \(2, 5\)"):
        op(x, weight, key_start=starts[:, :4])
    with pytest.raises(RuntimeError, match="key_start must be int32"):
        op(x, weight, key_start=starts.long())


# The package causal_conv1d


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_the_packages_function(device, activation):
    """Its documents, and states that are given and returned."""
    x, weight, bias, state = inputs(device, F32, 2, 8, 9, 4, state=True)
    ours = {"activation": "none" if activation is None else "silu"}
    documents = torch.tensor([[4] * 3 + [1] * 6, [0] * 9], dtype=torch.int32, device=device)
    starts = torchweld.key_start_from_documents(documents)
    packed = causal_conv1d_fn(x, weight, bias, seq_idx=documents, activation=activation)
    assert_same_bits(packed, op(x, weight, bias, key_start=starts, **ours))
    kwargs = {"activation": activation, "return_final_states": True}
    y, final = causal_conv1d_fn(x, weight, bias, initial_states=state, **kwargs)
    assert_same_bits(y, op(x, weight, bias, state, **ours))
    assert_same_bits(final, x[..., -3:])
    short, final = causal_conv1d_fn(x[..., :2], weight, bias, initial_states=state, **kwargs)
    assert_same_bits(final, torch.cat([state[..., 2:], x[..., :2]], -1))
    out = torch.empty_like(state)
    _, final = causal_conv1d_fn(x[..., :1], weight, bias, final_states_out=out, **kwargs)
    assert final is out
    assert_same_bits(out, F.pad(x[..., :1], (2, 0)))


@pytest.mark.parametrize("length", [3, 4, 6])
def test_steps_of_generation(device, length):
    """One position, and two at once, give the bits of the whole sequence; the state follows."""
    for dtype in dtypes(device):
        x, weight, bias = inputs(device, dtype, 2, 8, 9, 4)
        whole = causal_conv1d_fn(x, weight, bias, activation="silu")
        state = F.pad(x[..., :5], (length, 0))[..., -length:]
        first = causal_conv1d_update(x[..., 5], state, weight, bias, "silu")
        rest = causal_conv1d_update(x[..., 6:8], state, weight, bias, "silu")
        assert_same_bits(first, whole[..., 5])
        assert_same_bits(rest, whole[..., 6:8])
        assert_same_bits(state, F.pad(x[..., :8], (length, 0))[..., -length:])


def test_wider_weights_of_the_package(device):
    x, weight, bias = inputs(device, BF16, 2, 8, 9, 4)
    y = causal_conv1d_fn(x, weight.float(), bias.float())
    assert_same_bits(y, op(x.float(), weight.float(), bias.float()).to(BF16))


def test_refusals_of_the_package(device):
    x, weight, bias, state = inputs(device, F32, 2, 8, 5, 4, state=True)
    numbers = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="seq_idx must be None with initial or final states"):
        causal_conv1d_fn(x, weight, seq_idx=numbers[:, None].expand(2, 5), initial_states=state)
    with pytest.raises(ValueError, match="activation must be None"):
        causal_conv1d_fn(x, weight, activation="gelu")
    for name in ("cache_seqlens", "conv_state_indices"):
        with pytest.raises(ValueError, match=f"{name} must be None; give the states"):
            causal_conv1d_update(x, state, weight, **{name: numbers})
    with pytest.raises(ValueError, match=r"conv_state must be \(batch, channels, 3 or more\)"):
        causal_conv1d_update(x, state[..., :2], weight)


# Two processes: transformers looks for the package once, when it loads a model's code.
STEPS = """
import sys, torch
ours = sys.argv[2] == "ours"
if ours:
    import torchweld.compat.causal_conv1d
    sys.modules["causal_conv1d"] = torchweld.compat.causal_conv1d
from torch.utils._python_dispatch import TorchDispatchMode
from tiny_models import batch, tiny_model

class Calls(TorchDispatchMode):
    count = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "causal_conv1d" in str(func)
        return func(*args, **(kwargs or {}))

inputs = batch("cpu")
del inputs["position_ids"]
results = []
for kind, name in ("qwen3_next", "Qwen3Next"), ("falcon_h1", "FalconH1"):
    torch.manual_seed(0)
    model = tiny_model(kind, f"{name}ForCausalLM", "sdpa")
    with Calls() as calls:
        model(**inputs).logits.square().mean().backward()
        options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
        tokens = model.eval().generate(**inputs, **options)
    assert (calls.count > 6) == ours, name
    results.append([tokens, [p.grad for p in model.parameters() if p.grad is not None]])
torch.save(results, sys.argv[1])
"""


def test_models_run_it_in_the_packages_place(tmp_path):
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
        pytest.skip("this transformers asks for the metadata of the package")
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    results = []
    for which in ("stock", "ours"):
        done = commands.python("-c", STEPS, tmp_path / "results.pt", which, **path)
        assert done.returncode == 0, done.stderr
        results.append(torch.load(tmp_path / "results.pt"))
    for (want, want_grads), (tokens, grads) in zip(*results, strict=True):
        assert_equal(tokens, want)
        torch.testing.assert_close(grads, want_grads, rtol=1e-4, atol=1e-6)
