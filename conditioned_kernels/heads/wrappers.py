"""Modules around a user's modules: which to look through, and the names they leave to the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils import parametrize

WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Classes that wrap a module under a name which is not the user's. Matched by class, never by the name."""

ADAPTERS = ("base_layer", "org_layer", "original_layer")
"""Attributes under which an adapter (LoRA and its kin) keeps the layer it adapts. The name is part of the user's."""


def full_name(cls: type) -> str:
    """``module.Class``, the form the family table names classes in."""
    return f"{cls.__module__}.{cls.__qualname__}"


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any nesting of :data:`WRAPPERS`."""
    while True:
        inner = next((WRAPPERS[name] for name in map(full_name, type(module).__mro__) if name in WRAPPERS), None)
        if inner is None:
            return module
        module = module._modules[inner]  # type: ignore[assignment]


def is_offloaded(model: nn.Module) -> bool:
    """Whether hooks (accelerate's) keep weights of the model elsewhere, and leave it meta tensors between forwards."""
    hooks = [module.__dict__.get("_hf_hook") for module in model.modules()]
    return any(getattr(each, "offload", False) for hook in hooks for each in getattr(hook, "hooks", (hook,)))


def look_through(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The layer inside any nesting of wrappers and adapters, and the adapters' segments of its name."""
    names: tuple[str, ...] = ()
    while True:
        module = unwrap(module)
        inner = next((name for name in ADAPTERS if module._modules.get(name) is not None), None)
        if inner is None:
            return module, names
        module, names = module._modules[inner], (*names, inner)  # type: ignore[assignment]


def is_adapted(parameter: str) -> bool:
    """Whether a name found by :func:`own_name` passes through an adapter."""
    return any(name in ADAPTERS for name in parameter.split(".")[:-1])


def own_name(module: nn.Module, path: str) -> str:
    """The user's name, relative to ``module``, of the weight that a layout calls ``path``.

    Adapters insert a segment ("q_proj.weight" is "q_proj.base_layer.weight"), or forward the attribute to a module
    of another name, which is then found by identity.
    """
    *owners, last = path.split(".")
    names: list[str] = []
    owner = module
    for name in owners:
        owner, inserted = look_through(getattr(owner, name))
        names += (name, *inserted)
    if last not in owner._parameters and not parametrize.is_parametrized(owner, last):
        weight = getattr(owner, last)
        last = next((name for name, parameter in owner.named_parameters() if parameter is weight), last)
    return ".".join((*names, last))


def parametrizations(owner: nn.Module, attribute: str) -> nn.Module:
    """What recomputes ``owner``'s parametrized ``attribute``, with the tensors it does so from."""
    return owner.get_submodule(f"parametrizations.{attribute}")


@contextmanager
def quiet_parametrizations(model: nn.Module) -> Iterator[None]:
    """Put every parametrization into evaluation mode, so that reading a weight changes no state (spectral norm's)."""
    noisy = [
        each
        for module in model.modules()
        if parametrize.is_parametrized(module)
        for each in module.get_submodule("parametrizations").modules()
        if each.training
    ]
    try:
        for each in noisy:
            each.training = False
        yield
    finally:
        for each in noisy:
            each.training = True
