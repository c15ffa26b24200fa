"""torchweld.fuse of norms with a gate: linear attention's and Mamba's."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers")

from test_fuse import Calls  # noqa: E402
from tiny_models import causal_models, fuse_keeping_stock, tiny_model  # noqa: E402
from torchweld.integrations import fuse, unfuse  # noqa: E402
from torchweld.integrations.fusion.layers.fused_module import stock_forward  # noqa: E402

MODELS = dict(causal_models())


def model_of(kind, device="cpu"):
    if kind not in MODELS:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    model = tiny_model(kind, MODELS[kind], "sdpa").to(device)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 0.7, 0.2)
    return model


def step(model):
    ids = (torch.arange(24, device=model.device) * 7 % 50).view(2, 12)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    model.zero_grad()
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
def test_a_model_trains_as_stock(device, kind):
    model = model_of(kind, device).train()
    stock, report = fuse_keeping_stock(model, only="norm")
    gated = [path for path, op in report.ops.items() if op == "rms_norm_gated"]
    assert gated
    with Calls() as calls:
        logits, grads = step(model)
    assert calls.names["torchweld::rms_norm_gated_backward"] >= len(gated)
    want, want_grads = step(stock)
    assert_close(logits, want, rtol=1e-4, atol=1e-5)
    for name, want_grad in want_grads.items():
        if want_grad is None:
            assert grads[name] is None, name
            continue
        size = float(want_grad.abs().max())
        assert_close(grads[name], want_grad, rtol=1e-3, atol=1e-3 * size + 1e-7, msg=name)
    unfuse(model)
    with Calls() as calls:
        step(model)
    assert not any("torchweld" in name for name in calls.names)


@pytest.mark.parametrize("kind", ["kimi_linear", "bailing_hybrid"])
def test_another_gate_stays_stock(kind):
    report = fuse(model_of(kind).eval(), only="norm")
    assert "rms_norm_gated" not in report.ops.values()
    assert "has the parts of an RMSNorm with a gate and computes something else" in str(report)


def test_a_norm_of_several_groups_stays_stock():
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    kind = getattr(modeling, "NemotronHRMSNormGated", None)
    if kind is None:
        pytest.skip("this transformers has another class")
    model = model_of("nemotron_h").eval()
    found = [m for m in model.modules() if type(m) is kind]
    assert found
    for norm in found:
        norm.group_size = norm.weight.numel() // 2
    report = fuse(model, only="norm")
    assert "rms_norm_gated" not in report.ops.values()
    assert "NemotronHRMSNormGated" in str(report)


def test_calls_that_the_op_does_not_serve_run_stock():
    model = model_of("bamba").eval()
    fuse(model, only="norm")
    norm = next(m for m in model.modules() if type(m).__name__ == "BambaRMSNormGated")
    x = torch.randn(3, norm.weight.numel())
    alone = norm(x)
    assert_close(alone, torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, 1e-6),
                 rtol=1e-3, atol=1e-3)  # fmt: skip
    gate = torch.randn(1, x.shape[-1])
    with Calls() as calls:
        got = norm(x, gate)  # the gate is one row for all
    assert not any("gated" in name for name in calls.names)
    assert_close(got, stock_forward(norm, x, gate))
