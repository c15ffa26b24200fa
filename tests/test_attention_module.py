"""torchweld.nn.Attention beside the same block in plain torch and beside transformers' classes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchweld
from numerics import assert_equal, assert_same_bits, check_promise
from samples import F32
from torchweld.nn import Attention, Int4Linear

OPTIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "rotary": {"num_kv_heads": 1, "rotary": 10000.0},
    "window": {"rotary": 500.0, "window": 3, "bias": True},
    "qk_norm": {"num_kv_heads": 2, "rotary": 10000.0, "qk_norm": True, "head_dim": 6},
    "bidirectional": {"causal": False, "qk_norm": True},
}
EACH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
LIKE_STOCK = ("rotary", "qk_norm")  # the options that transformers' classes have


def module(options: dict, device: str = "cpu", dtype: torch.dtype = F32) -> Attention:
    torch.manual_seed(0)
    made = Attention(16, 4, **options, device=device, dtype=dtype)
    for p in made.parameters():  # defaults of 1 would hide swapped weights
        nn.init.normal_(p, mean=0.1, std=0.4)
    return made


def tokens(*shape: int, device: str = "cpu", dtype: torch.dtype = F32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(device, dtype)


def plain(m: Attention, x: Tensor) -> Tensor:
    """The block as people write it by hand."""
    seqlen, group = x.shape[1], m.num_heads // m.num_kv_heads
    q, k, v = (p(x).unflatten(-1, (-1, m.head_dim)) for p in (m.q_proj, m.k_proj, m.v_proj))
    if m.qk_norm:
        q = nn.functional.rms_norm(q, (m.head_dim,), m.q_norm.weight, 1e-6)
        k = nn.functional.rms_norm(k, (m.head_dim,), m.k_norm.weight, 1e-6)
    if m.rotary is not None:
        steps = torch.arange(0, m.head_dim, 2, device=x.device, dtype=F32) / m.head_dim
        angles = torch.arange(seqlen, device=x.device)[:, None, None] * (1.0 / m.rotary**steps)
        cos, sin = (t.repeat(1, 1, 2).to(x.dtype) for t in (angles.cos(), angles.sin()))
        q, k = (
            t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k)
        )
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    i, j = torch.arange(seqlen, device=x.device)[:, None], torch.arange(seqlen, device=x.device)
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool, device=x.device)
    if m.causal:
        seen = j <= i
    if m.window is not None:
        seen = seen & (j > i - m.window) & (j < i + m.window)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, seen)
    return m.o_proj(out.transpose(1, 2).flatten(2))


def results(run: Callable[[Tensor], Tensor], x: Tensor, m: Attention) -> list[Tensor]:
    """The result of a block and the gradients of its sum of squares."""
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    return [y, *torch.autograd.grad(y.square().sum(), [leaf, *m.parameters()])]


def relative(tensors: list[Tensor], scales: list[Tensor]) -> Tensor:
    """All values of tensors, each tensor divided by its scale."""
    return torch.cat([(t / s).flatten() for t, s in zip(tensors, scales, strict=True)])


@EACH
def test_result_and_gradients(device, options):
    m, x = module(options, device), tokens(2, 9, 16, device=device)
    wide = copy.deepcopy(m).double()
    ours, eager, exact = (
        results(run, x.to(of.q_proj.weight.dtype), of)
        for run, of in ((m, m), (lambda x: plain(m, x), m), (lambda x: plain(wide, x), wide))
    )
    # All together, relative to the largest of each: in a gradient of six numbers torch's own error
    # is little by chance.
    scales = [t.abs().max() for t in exact]
    check_promise(*(relative(tensors, scales) for tensors in (ours, eager, exact)))
    if device == "cpu":
        for got, ref in zip(results(wide, x.double(), wide), exact, strict=True):
            torch.testing.assert_close(got, ref, rtol=1e-11, atol=1e-11)


def test_a_cache_of_quantised_projections():
    m = Attention(128, 4, num_kv_heads=2, rotary=10000.0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(m, name, Int4Linear.from_torch(getattr(m, name)))
    x, (keys, values) = tokens(1, 3, 128), m.new_cache(1, 4)
    assert keys.dtype == values.dtype == F32 and keys.shape == (1, 2, 4, 32)
    part = m(x, key_end=torch.tensor([3], dtype=torch.int32), cache=(keys, values))
    assert_equal(part, m(x))


@EACH
def test_a_cache_gives_what_the_whole_sequence_gives(device, options):
    if not options.get("causal", True):
        pytest.skip("a cache holds no later tokens")
    m, x = module(options, device), tokens(2, 9, 16, device=device)
    with torch.no_grad():
        whole, cache = m(x), m.new_cache(2, 12)
        assert cache[0].shape == (2, m.num_kv_heads, 12, m.head_dim)
        for first, end in ((0, 4), (4, 5), (5, 9)):
            lengths = torch.full((2,), end, dtype=torch.int32, device=device)
            part = m(x[:, first:end], key_end=lengths, cache=cache)
            torch.testing.assert_close(part, whole[:, first:end], rtol=1e-5, atol=1e-5)


def test_sequences_of_a_cache_have_lengths_of_their_own(device):
    m, x = module(OPTIONS["rotary"], device), tokens(2, 6, 16, device=device)
    with torch.no_grad():
        cache = m.new_cache(2, 8)
        prompt = torch.tensor([5, 5], dtype=torch.int32, device=device)
        m(x[:, :5], key_end=prompt, cache=cache)
        lengths = torch.tensor([4, 6], dtype=torch.int32, device=device)  # the first drops a token
        last = m(x[:, 5:], key_end=lengths, cache=cache)
        shorter = m(torch.cat([x[:1, :3], x[:1, 5:]], 1))[:, 3:]
        torch.testing.assert_close(last[:1], shorter, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last[1:], m(x[1:])[:, 5:], rtol=1e-5, atol=1e-5)


def test_padding_and_packed_documents(device):
    m, x = module(OPTIONS["rotary"], device), tokens(1, 4, 16, device=device)
    padded = torch.cat([torch.full((1, 3, 16), 1e4, device=device), x], 1)
    leftpad = torch.tensor([3], dtype=torch.int32, device=device)
    torch.testing.assert_close(m(padded, leftpad)[:, 3:], m(x), rtol=1e-5, atol=1e-5)
    starts = torch.tensor([[0, 0, 2, 2]], dtype=torch.int32, device=device)
    two = torch.cat([m(x[:, :2]), m(x[:, 2:])], 1)
    torch.testing.assert_close(m(x, key_start=starts), two, rtol=1e-5, atol=1e-5)
    right = torch.cat([x, torch.full((1, 3, 16), 1e4, device=device)], 1)
    lengths = torch.tensor([4], dtype=torch.int32, device=device)
    torch.testing.assert_close(m(right, key_end=lengths)[:, :4], m(x), rtol=1e-5, atol=1e-5)


def test_dropout_is_for_training(device):
    m, x = module({"dropout": 0.5, "rotary": 10000.0}, device), tokens(2, 9, 16, device=device)
    still = module({"rotary": 10000.0}, device)(x)
    assert_same_bits(m.eval()(x), still)
    m.train()
    torch.manual_seed(3)
    first = m(x)
    assert not m(x).equal(first)
    torch.manual_seed(3)
    assert_same_bits(m(x), first)


@EACH
def test_scripted_compiled_and_copied(device, options):
    m, x = module(options, device), tokens(2, 9, 16, device=device)
    expected = m(x)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    for run in (torch.jit.script(m), compiled, copy.deepcopy(m)):
        assert_same_bits(run(x), expected)
    again = eval(f"Attention({m.extra_repr()})", vars(torchweld.nn))
    again.to(device).load_state_dict(m.state_dict(), strict=True)
    assert_same_bits(again(x), expected)
    m.reset_parameters()
    assert not m(x).equal(expected)


def test_the_angles_stay_float32():
    m = module(OPTIONS["rotary"]).to(torch.bfloat16)
    assert m.inv_freq.dtype == F32 and m.q_proj.weight.dtype == torch.bfloat16
    assert "inv_freq" not in m.state_dict()
    moved = module(OPTIONS["rotary"]).to("meta")
    assert moved.inv_freq.is_meta and moved(torch.zeros(1, 3, 16, device="meta")).shape == (
        1,
        3,
        16,
    )


@pytest.mark.parametrize("name", LIKE_STOCK)
def test_to_and_from_transformers(name):
    pytest.importorskip("transformers")
    m, x = module({**OPTIONS[name], "dropout": 0.1}).eval(), tokens(2, 9, 16)
    m.k_proj.weight.requires_grad_(False)
    stock = m.to_torch()
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    tables = LlamaRotaryEmbedding(stock.config)(x, torch.arange(9)[None])
    theirs = stock(x, position_embeddings=tables, attention_mask=None)[0]
    torch.testing.assert_close(theirs, m(x), rtol=1e-5, atol=1e-5)
    back = Attention.from_torch(stock)
    assert repr(back) == repr(m) and back.training is False and back.dropout == 0.1
    assert_same_bits(back(x), m(x))
    assert not back.k_proj.weight.requires_grad and back.q_proj.weight.requires_grad
    assert set(stock.state_dict()) == set(m.state_dict())


def changed(m: nn.Module, **values: object) -> nn.Module:
    for name, value in values.items():
        setattr(m, name, value)
    return m


def stock(**rope: object) -> nn.Module:
    theirs = module(OPTIONS["rotary"]).to_torch()
    theirs.config.rope_parameters.update(rope)
    return theirs


REFUSALS = {
    "kv heads": (lambda: Attention(16, 4, 3), "num_kv_heads must divide num_heads = 4, but got 3"),
    "heads": (lambda: Attention(16, 3), "num_heads must divide embed_dim = 16, but got 3; or give"),
    "odd": (lambda: Attention(15, 5, rotary=1e4), "head_dim must be even with rotary, but got 3"),
    "dropout": (lambda: Attention(16, 4, dropout=2.0), "dropout must be between 0 and 1, but got"),
    "dims": (
        lambda: Attention(16, 4)(torch.randn(3, 16)),
        r"x must be \(batch, seqlen, embed_dim\)",
    ),
    "cache": (
        lambda: (m := Attention(16, 4))(torch.randn(1, 1, 16), cache=m.new_cache(1, 2)),
        "key_end must be given with a cache, but got None",
    ),
    "other": (lambda: Attention.from_torch(nn.Linear(2, 2)), "module must be transformers' Llama"),
    "rope": (
        lambda: Attention.from_torch(stock(rope_type="linear", factor=2.0)),
        "the rotary embedding must be of type default, but got",
    ),
    "scale": (
        lambda: Attention.from_torch(changed(stock(), scaling=1.0)),
        r"module.scaling must be head_dim \*\* -0.5, but got 1.0",
    ),
    "projection": (
        lambda: Attention.from_torch(changed(stock(), q_proj=nn.Identity())),
        "module.q_proj must be nn.Linear, but got Identity",
    ),
    "to_torch": (lambda: Attention(16, 4).to_torch(), "the module must be causal with rotary"),
    "window": (
        lambda: Attention(16, 4, rotary=1e4, window=2).to_torch(),
        "without window unless it has qk_norm",
    ),
    "mixed": (
        lambda: changed(
            Attention(16, 4, rotary=1e4), q_proj=nn.Linear(16, 16, False).half()
        ).to_torch(),
        "k_proj.weight must have the dtype of q_proj.weight",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(call, sentence):
    if sentence.startswith(("module", "the rotary", "without", "the module", "k_proj")):
        pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=sentence):
        call()


def test_outside_of_context_parallel_alone(monkeypatch):
    from torchweld.distributed import _active

    monkeypatch.setattr(_active, "current", object())
    with pytest.raises(ValueError, match="outside of context_parallel, but got a call inside"):
        Attention(16, 4)(torch.randn(1, 2, 16))


def test_lora_and_hooks_on_projections():
    m, x = module(OPTIONS["grouped"]), tokens(1, 5, 16)
    seen = []
    m.q_proj.register_forward_hook(lambda *_: seen.append("q"))
    expected = m(x)
    assert seen == ["q"]
    m.v_proj = nn.Sequential(m.v_proj, nn.Identity())
    assert_equal(m(x), expected)
