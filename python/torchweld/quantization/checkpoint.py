"""Loads 4-bit checkpoints of AutoAWQ, GPTQ and compressed-tensors as models with Int4Linear."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.nn import Int4Linear

from .float_layers import features_of, linear_classes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWNER = "torchweld.load_quantized"


def load_quantized(path: str | Path, model_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """Loads a 4-bit checkpoint of another library as a model with `Int4Linear` layers.

    The weights are exactly those of the checkpoint, in its dtype. `save_pretrained` of the model
    writes torchweld's own format, which `from_pretrained` loads.

    Args:
        path: a folder with config.json and safetensors files. The config's quantization_config
            names "awq" (version "gemm"), "gptq" (4 bits, without act-order) or
            "compressed-tensors" ("pack-quantized" with 4 bits, weights alone). AutoGPTQ's older
            quantize_config.json serves too.
        model_class: a class of transformers, an Auto class or one of yours; by default the first
            of the config's `architectures`.
        kwargs: passed to `from_pretrained`: device_map, dtype, attn_implementation.

    Returns:
        The model, as `from_pretrained` returns it.

    Raises:
        ImportError: transformers is missing or too old.
        FileNotFoundError: the folder has no config.json or no safetensors files.
        ValueError: another format, or tensors that do not fit it or the model.

    Example (needs a download)::

        model = torchweld.load_quantized("Llama-3.1-8B-Instruct-AWQ", device_map="auto")
        model.save_pretrained("Llama-3.1-8B-Instruct-int4")
    """
    from torchweld.integrations.version import check_version

    check_version(_OWNER)
    import transformers

    from torchweld.integrations import TorchweldInt4Config
    from torchweld.quantization.quantizer import tied_layers

    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{_OWNER}: {folder} must have config.json, but it is not there")
    config = transformers.AutoConfig.from_pretrained(folder)
    convert = _converter(_settings(config, folder))
    if model_class is None:
        name = (config.architectures or ["AutoModelForCausalLM"])[0]
        model_class = getattr(transformers, name, None)
        if model_class is None:
            raise ValueError(
                f"{_OWNER}: architectures of config.json must name a class of transformers, but "
                f"got {name!r}; pass the class as model_class"
            )
    with torch.device("meta"):
        # An Auto class only builds models of other classes, by from_config.
        plain = getattr(model_class, "from_config", model_class)(config)
    model_class = type(plain)
    state = _load_files(folder)
    layers = dict(_converted(state, convert))
    paths = _paths_in(plain, layers)
    left = _check_layers(plain, {paths[name]: layer for name, layer in layers.items()})
    if tied := tied_layers(plain).intersection(paths.values()):
        raise ValueError(
            f"{_OWNER}: {min(tied)} must have float weights, which the config ties to others, but "
            "got 4-bit codes; set tie_word_embeddings to false in config.json to use the codes"
        )
    sizes = {paths[name]: layer.group_size for name, layer in layers.items()}
    common = max(set(sizes.values()), key=list(sizes.values()).count)
    groups = {path: size for path, size in sizes.items() if size != common}
    config.quantization_config = TorchweldInt4Config(common, (), left=left, groups=groups).to_dict()
    for name, layer in layers.items():
        state |= {f"{name}.{key}": tensor for key, tensor in layer.state_dict().items()}
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **kwargs
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            names = ", ".join(str(key) for key in list(info[what])[:3])
            raise ValueError(
                f"{_OWNER}: the checkpoint must have the tensors of {model_class.__name__}, but "
                f"got {len(info[what])} {what.replace('_', ' ')}: {names}"
            )
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _settings(config: Any, folder: Path) -> Mapping[str, Any]:
    found = getattr(config, "quantization_config", None)
    if found is None and (folder / "quantize_config.json").is_file():
        return {"quant_method": "gptq"} | json.loads((folder / "quantize_config.json").read_text())
    if found is None:
        raise ValueError(
            f"{_OWNER}: config.json must have a quantization_config, but got none; use "
            "from_pretrained, then torchweld.quantize_"
        )
    return found if isinstance(found, dict) else found.to_dict()


# Converts a layer's path and its tensors, by their names, to an Int4Linear.
_Convert = Callable[[str, dict[str, Tensor]], Int4Linear]


def _converter(settings: Mapping[str, Any]) -> tuple[str, _Convert]:
    """Returns the name of a layer's codes, and the function that takes its tensors.

    Raises:
        ValueError: a format that the functions do not read.
    """
    method = settings.get("quant_method")
    if method == "awq":
        _expect(settings, bits=(4,), version=("gemm",), zero_point=(True,))
        size = settings.get("group_size")
        return "qweight", lambda _, tensors: Int4Linear.from_awq(**tensors, group_size=size)
    if method == "gptq":
        dynamic = settings.get("dynamic") or {}  # layers to skip begin with "-:"
        quantised = {key: value for key, value in dynamic.items() if not key.startswith("-:")}
        _expect({**settings, "dynamic": quantised}, bits=(4,), dynamic=({},))
        _expect(settings, checkpoint_format=("gptq", "gptq_v2", None))
        return "qweight", lambda _, tensors: _from_gptq(settings, tensors)
    if method == "compressed-tensors":
        _expect(settings, format=("pack-quantized",), kv_cache_scheme=(None,))
        # transform_config may rotate activations, which an Int4Linear does not do.
        _expect(settings, transform_config=(None, {}), sparsity_config=(None, {}))
        for group in settings["config_groups"].values():
            _expect(group, format=("pack-quantized", None), input_activations=(None,))
            _expect(group, output_activations=(None,))
            _expect(group["weights"], num_bits=(4,), type=("int",), dynamic=(False, None))
            _expect(group["weights"], strategy=("group", "channel"))
        groups = list(settings["config_groups"].values())
        return "weight_packed", lambda *layer: _from_compressed(groups, *layer)
    own = "; use register_quantizer, then from_pretrained" if method == "torchweld_int4" else ""
    raise ValueError(
        f'{_OWNER}: quant_method must be "awq", "gptq" or "compressed-tensors", but got {method!r}'
        + own
    )


def _from_gptq(settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> Int4Linear:
    kind = settings.get("checkpoint_format") or "gptq"
    size = settings.get("group_size")
    if settings.get("desc_act"):
        _must_have(tensors, "g_idx", "desc_act=True")
    layer = Int4Linear.from_gptq(**tensors, checkpoint_format=kind, group_size=size)
    if settings.get("sym"):
        other = "gptq_v2" if kind == "gptq" else "gptq"
        fix = f"; if the file stores it as {other!r} does, write that as its checkpoint_format"
        _check_symmetric(layer, f"sym=True and checkpoint_format={kind!r}", fix)
    return layer


def _from_compressed(
    groups: list[Mapping[str, Any]], path: str, tensors: dict[str, Tensor]
) -> Int4Linear:
    weights = _group_of(groups, path)["weights"]
    size = -1 if weights.get("strategy") == "channel" else weights.get("group_size")
    symmetric, actorder = weights.get("symmetric", True), weights.get("actorder")
    if actorder in ("group", "dynamic", True):
        _must_have(tensors, "weight_g_idx", f"actorder={actorder!r}")
    if not symmetric:
        _must_have(tensors, "weight_zero_point", "symmetric=False")
    layer = Int4Linear.from_compressed_tensors(**tensors, group_size=size)
    if symmetric:
        _check_symmetric(layer, "symmetric=True")
    return layer


def _must_have(tensors: Mapping[str, Tensor], name: str, statement: str) -> None:
    if name not in tensors:
        raise ValueError(
            f"{name} must be there, by {statement} of the quantization_config, but got none"
        )


def _check_symmetric(layer: Int4Linear, statement: str, fix: str = "") -> None:
    zeros = ops.int4_unpack(layer.portable()[2], layer.scale.shape[1])
    if other := zeros[zeros != 8].tolist():
        raise ValueError(
            f"a zero must be 8, by {statement} of the quantization_config, but got {other[0]}{fix}"
        )


def _group_of(groups: list[Mapping[str, Any]], path: str) -> Mapping[str, Any]:
    """Returns the config group whose targets name a layer, by path, pattern of paths or class."""

    def rank(target: str) -> int:
        if target == path:
            return 0
        if target.startswith("re:") and re.match(target[3:], path):
            return 1
        return 2 if target == "Linear" else 3

    ranked = [(rank(target), group) for group in groups for target in group["targets"]]
    best, group = min(ranked, key=lambda entry: entry[0])
    if best == 3:
        listed = ", ".join(repr(target) for group in groups for target in group["targets"])
        raise ValueError(f"targets of the quantization_config must name it, but got {listed}")
    return group


def _expect(settings: Mapping[str, Any], **expected: tuple[Any, ...]) -> None:
    for name, values in expected.items():
        got = settings.get(name, values[0])
        got = got.lower() if isinstance(got, str) else got
        if got not in values:
            listed = " or ".join(repr(value) for value in values)
            raise ValueError(
                f"{_OWNER}: {name} of the quantization_config must be {listed}, but got {got!r}"
            )


def _load_files(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    state: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{_OWNER}: {folder} must have {name}, but it is not there")
        state |= load_file(folder / name)
    return state


def _converted(
    state: dict[str, Tensor], convert: tuple[str, _Convert]
) -> Iterator[tuple[str, Int4Linear]]:
    """Yields the quantised layers and removes their tensors from a state_dict."""
    codes, function = convert
    names: dict[str, list[str]] = {}  # each module's names of tensors
    for key in state:
        module, _, name = key.rpartition(".")
        names.setdefault(module, []).append(name)
    for layer in [module for module in names if codes in names[module]]:
        tensors = {name: state.pop(f"{layer}.{name}") for name in names[layer]}
        bias = tensors.get("bias")
        scale = tensors.get("scales", tensors.get("weight_scale"))
        if bias is not None and scale is not None:
            tensors["bias"] = bias.to(scale.dtype)
        try:
            yield layer, function(layer, tensors)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{_OWNER}: {layer}: {error}") from None


def _paths_in(model: PreTrainedModel, names: Collection[str]) -> dict[str, str]:
    """Maps layers' names in a checkpoint, which transformers may rename, to paths in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    prefix, known = model.base_model_prefix, model.state_dict()
    keys = (rename_source_key(f"{name}.weight", renamings, [], prefix, known) for name in names)
    return {name: key.removesuffix(".weight") for name, (key, _) in zip(names, keys, strict=True)}


def _check_layers(model: PreTrainedModel, layers: Mapping[str, Int4Linear]) -> list[str]:
    """Returns the model's linear layers that are not quantised.

    Raises:
        ValueError: no layer is quantised, or one is not a linear layer of the model, has another
            size, or a bias that is not zero if the model has none. AutoGPTQ writes zeros.
    """
    kind = type(model).__name__
    linears = {path: m for path, m in model.named_modules() if isinstance(m, linear_classes())}
    for name, layer in layers.items():
        if name not in linears:
            raise ValueError(
                f"{_OWNER}: {name} of the checkpoint must be a linear layer of {kind}, but it has "
                "none of this name"
            )
        expected, got = features_of(linears[name])[::-1], features_of(layer)[::-1]
        if expected != got:
            raise ValueError(f"{_OWNER}: {name} must be {expected}, but got {got}")
        if linears[name].bias is None and layer.bias is not None:
            if layer.bias.any():
                raise ValueError(
                    f"{_OWNER}: {name}.bias must be zero, since {kind} has no bias there, but "
                    f"got {layer.bias.abs().max().item():.3g}"
                )
            layer.bias = None
    if not layers:
        raise ValueError(f"{_OWNER}: the checkpoint must have quantised layers, but got none")
    return [path for path in linears if path not in layers]
