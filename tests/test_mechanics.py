"""The mechanics table: each row gives exactly what its class feeds to its output projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.heads.mechanics import MECHANICS, attention_heads
from conditioned_kernels.jacobian import AttentionHeads, NoJacobian, attention_output

from .models import CASES, Case

COVERED = {name for row in MECHANICS for name in row.classes}
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "proj", "o", "out_lin")
"""Output projections inside attention classes; the BERT kind has none and returns the heads."""

TOLERANCE = 3e-5
"""Relative, in float32 models; a mechanic that is ignored moves the output by far more."""


def randomized(model: nn.Module) -> nn.Module:
    """Every parameter Gaussian and large enough that probabilities, biases and gains matter."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):
            module.attn_logit_softcapping = 1.0  # The usual 50 would hardly bend these logits.
        if type(module).__name__ == "Attention" and getattr(module, "gate", None) is not None:
            module.gate = None  # It comes after the heads.
    return model.eval()


def run(model: nn.Module, args: tuple, kwargs: dict[str, Any], **options: Any) -> dict[str, tuple[Any, Tensor]]:
    """Per layer of a covered class: the problem read from its first call, and the heads the module went on with."""
    found: dict[str, tuple[Any, Tensor]] = {}
    hooks = []
    options = {"samples": None, "tokens": None, **options}
    for layer in ck.find_attention(model).layers:
        calls: list[Any] = []
        outputs: list[Tensor] = []

        def before(module, args, kwargs, layer=layer, calls=calls):
            try:
                calls.append(attention_heads(layer, args, kwargs, **options))
            except NoJacobian as error:
                calls.append(error)

        hooks.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
        module = layer.module
        after = next(
            (getattr(module, name) for name in OUTPUTS if isinstance(getattr(module, name, None), nn.Module)), None
        )
        if isinstance(module, nn.MultiheadAttention):
            # It reads its output projection's weight and never calls it.
            with torch.no_grad():
                nn.init.eye_(module.out_proj.weight)
                module.out_proj.bias.zero_() if module.out_proj.bias is not None else None
            after = None
        if after is not None:
            hooks.append(after.register_forward_pre_hook(lambda m, args, outputs=outputs: outputs.append(args[0])))
        else:
            hooks.append(
                module.register_forward_hook(
                    lambda m, args, out, outputs=outputs: outputs.append(out[0] if isinstance(out, tuple) else out)
                )
            )
        found[layer.name] = (calls, outputs)
    before_rng = torch.get_rng_state()
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    assert torch.equal(torch.get_rng_state(), before_rng) or model.training
    return {name: (calls[0], outputs[0]) for name, (calls, outputs) in found.items() if calls}


def joined(heads: AttentionHeads) -> Tensor:
    """(samples, tokens, heads * value_dim), as the output projection gets it."""
    return attention_output(heads).transpose(1, 2).flatten(2)


def error(heads: AttentionHeads, seen: Tensor) -> float:
    got = joined(heads)
    if seen.shape[0] != got.shape[0]:
        seen = seen.transpose(0, 1)
    return float((got - seen.double()).norm() / seen.double().norm())


def mutations(heads: AttentionHeads) -> dict[str, AttentionHeads]:
    """The problem with one mechanic ignored, for each that it has."""
    changes: dict[str, dict[str, Any]] = {
        "scale": {"scale": 1.5 * (heads.scale or heads.w_q.shape[-2] ** -0.5)},
        **{name: {name: None} for name in ("mask", "rope", "norm_q", "norm_k", "softcap")},
        **{name: {name: None} for name in ("b_q", "b_v")},
    }
    return {
        name: replace(heads, **change)
        for name, change in changes.items()
        if name == "scale" or getattr(heads, name) is not None
    }


CHECKED = [case for case in CASES if case.covers in COVERED]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_it_is_what_the_module_computes(case: Case):
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    got = run(randomized(model), args, kwargs)
    checked = 0
    for name, (heads, seen) in got.items():
        if isinstance(heads, NoJacobian):
            continue
        assert error(heads, seen) < TOLERANCE, name
        for what, changed in mutations(heads).items():
            assert error(changed, seen) > 10 * TOLERANCE, f"{name}: ignoring {what} goes unseen"
        checked += 1
    refused = "bias-kv" in case.name
    assert checked == (0 if refused else len(got))
