"""Build a model from a name.

``transformers:gpt2``, ``timm:vit_base_patch16_224``, ``torch:encoder-12x768x12``, or ``python:my_model.py:build``,
which runs that file of yours and calls its function; the file may also register layouts.

Nothing is downloaded: architectures come from configurations, weights from the libraries' own initialization.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARIES = ("transformers", "timm", "torch", "python")


class ArchitectureError(ValueError):
    """The name or configuration of an architecture cannot be built."""


def is_architecture(name: str) -> bool:
    """Whether ``name`` has the form of an architecture, ``library:model``."""
    return name.partition(":")[0] in LIBRARIES and ":" in name


def build(name: str, *, config: str | Path | None = None, device: str = "cpu", seed: int = 0) -> nn.Module:
    """The model ``name``, in training mode, initialized by its own library.

    Parameters
    ----------
    name : ``transformers:<model type>``, ``timm:<model>``, ``torch:encoder-<layers>x<width>x<heads>`` or
        ``python:<file>:<function without arguments>``.
    config : for transformers, a JSON file with the configuration; default the model type's own.
    device : "cpu", or "meta" for a model without values.
    seed : of torch's random state while the library initializes; the state is restored afterwards.

    Raises
    ------
    ArchitectureError
        for a name or configuration that does not exist, or a library that is not installed.
    """
    library, _, model = name.partition(":")
    if library not in LIBRARIES or not model:
        raise ArchitectureError(
            "expected an architecture like transformers:gpt2, timm:vit_base_patch16_224 or torch:encoder-12x768x12, "
            f"got {name!r}"
        )
    if config is not None and library != "transformers":
        raise ArchitectureError(f"a configuration file goes with transformers architectures, got one for {name!r}")
    with torch.device(device), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        if library == "transformers":
            return from_config(transformers_config(model, config))
        return {"timm": _timm, "torch": _torch, "python": _python}[library](model)


def of_checkpoint(like: str | None, config: str | Path | None, beside: Path | None = None) -> nn.Module | None:
    """The architecture of stored tensors, without values.

    That is ``like`` with ``config``; else what ``config`` or the configuration ``beside`` the tensors says; else None.
    """
    if like is not None:
        return build(like, config=config, device="meta")
    if (file := config or beside) is None:
        return None
    with torch.device("meta"):
        return from_config(transformers_config(None, file))


def transformers_config(model_type: str | None, file: str | Path | None) -> Any:
    """A transformers configuration from a model type, a JSON file, or both (the file on the type's defaults)."""
    transformers = _library("transformers")
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArchitectureError(f"cannot read the configuration {file}: {error}") from error
        if not isinstance(values, dict):
            raise ArchitectureError(f"the configuration {file} must be a JSON object, got {type(values).__name__}")
    if model_type is not None and values.get("model_type", model_type) != model_type:
        raise ArchitectureError(
            f"the configuration {file} is of model type {values['model_type']!r}, not {model_type!r}; name the "
            "architecture it belongs to"
        )
    model_type = model_type or values.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise ArchitectureError(
            f"transformers {transformers.__version__} has no model type {model_type!r}; its types are listed in "
            "transformers.CONFIG_MAPPING, such as gpt2, bert, llama, vit"
        )
    values.pop("model_type", None)
    try:
        return transformers.AutoConfig.for_model(model_type, **values)
    except Exception as error:  # its strict configurations raise a class of their own
        why = " ".join(str(error).split())
        raise ArchitectureError(f"the configuration of transformers:{model_type} is refused: {why}") from error


def from_config(config: Any) -> nn.Module:
    """The model of a transformers configuration: the class it names, else with its pre-training or language head."""
    transformers = _library("transformers")
    for named in config.architectures or ():
        # A name of a model in transformers; any other, such as that of code beside a checkpoint, says nothing here.
        cls = getattr(transformers, named, None) if isinstance(named, str) else None
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            wanted = getattr(cls, "config_class", None)
            if not (isinstance(wanted, type) and isinstance(config, wanted)):
                raise ArchitectureError(
                    f"the configuration is a {type(config).__name__}, and the model {named} that it names is made from "
                    "another"
                )
            return cls(config)
    for auto in (transformers.AutoModelForPreTraining, transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise ArchitectureError(f"transformers has no model for {type(config).__name__}")


def example_input(model: nn.Module, tokens: int = 8) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of one sample that ``model``, as :func:`build` makes it, accepts; for the forward probe.

    A model of yours gives its own by a method ``example_input()``: a tuple of arguments or a dict of keywords.

    Raises
    ------
    ArchitectureError
        for a model whose input is not known.
    """
    if callable(own := getattr(model, "example_input", None)):
        given = own()
        return ((), given) if isinstance(given, dict) else (given if isinstance(given, tuple) else (given,), {})
    config: Any = getattr(model, "config", None)
    if isinstance(model, nn.TransformerEncoder):
        layer: Any = model.layers[0]
        return (torch.randn(1, tokens, layer.self_attn.embed_dim),), {}
    if hasattr(model, "pretrained_cfg") or hasattr(model, "default_cfg"):
        size: Any = getattr(model, "pretrained_cfg", None) or model.default_cfg
        return (torch.randn(1, *size["input_size"]),), {}
    kind = getattr(model, "main_input_name", None)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    if kind == "input_ids":
        return (), {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    if kind == "pixel_values":
        size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
        return (), {"pixel_values": torch.randn(1, getattr(config, "num_channels", 3), *size)}
    if kind == "input_values":
        return (), {"input_values": torch.randn(1, 4000)}
    if kind == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        return (), {"input_features": torch.randn(1, config.num_mel_bins, frames), "decoder_input_ids": ids}
    raise ArchitectureError(
        f"no example input is known for {type(model).__name__}; call conditioned_kernels.probe with one"
    )


def _timm(name: str) -> nn.Module:
    timm = _library("timm")
    if name not in timm.list_models():
        near = ", ".join(timm.list_models(f"*{name.split('_')[0]}*")[:5])
        raise ArchitectureError(f"timm {timm.__version__} has no model {name!r}" + (f"; near: {near}" if near else ""))
    return timm.create_model(name, pretrained=False)


def _torch(name: str) -> nn.Module:
    match = re.fullmatch(r"encoder-(\d+)x(\d+)x(\d+)", name)
    layers, width, heads = map(int, match.groups()) if match else (0, 0, 0)
    if not (layers and width and heads and width % heads == 0):
        raise ArchitectureError(
            f"expected torch:encoder-<layers>x<width>x<heads> with a width divisible by heads, got torch:{name}"
        )
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _python(name: str) -> nn.Module:
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ArchitectureError(f"expected python:<file>:<function> with an existing file, got python:{name}")
    make = runpy.run_path(file).get(function)
    if not callable(make):
        raise ArchitectureError(f"{file} has no function {function!r}")
    model = make()
    if not isinstance(model, nn.Module):
        raise ArchitectureError(f"{function} of {file} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _library(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ArchitectureError(f"{name} is not installed: pip install 'conditioned_kernels[{name}]'") from error
