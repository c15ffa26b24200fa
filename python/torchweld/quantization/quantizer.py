"""4-bit models of transformers: `from_pretrained` quantises them, saves them and loads them.

A quantised model's config.json names the method ("torchweld_int4"), the group size and the linear
layers that are not quantised. The layers' tensors are those of `Int4Linear`'s state_dict.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from torchweld._library import require
from torchweld.integrations.version import check_version, release
from torchweld.nn import Int4Linear

from .config import Int4
from .float_layers import heads_of, linear_classes, without_values
from .layers import Plan, dequantize_layers, plan_layers, quantize_layers, replace_layer
from .upload import upload

check_version("torchweld.integrations")  # before the classes below import transformers

from safetensors import safe_open  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.core_model_loading import ConversionOps  # noqa: E402
from transformers.quantizers import auto  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

METHOD = "torchweld_int4"
_SETTINGS = ("group_size", "skip", "method", "left", "groups")


class TorchweldInt4Config(QuantizationConfigMixin):
    """A `quantization_config` for `from_pretrained` of transformers: 4-bit `Int4Linear` layers.

    The weights of a float checkpoint are quantised as they are loaded. A quantised checkpoint has
    this config in its config.json; call `register_quantizer` before loading it. Making a config
    registers the quantizer too.

    Args:
        group_size, skip, method: as in `torchweld.Int4`.
        left: paths of the linear layers that are not quantised; `save_pretrained` records them.
        groups: by path, the group sizes of layers that differ from group_size.

    Raises:
        TypeError: another argument, or skip is not a collection of str.
        ValueError: a group_size or method that `torchweld.Int4` refuses.
        ImportError, RuntimeError: as `register_quantizer`.

    Example::

        model.save_pretrained("llama")
        config = torchweld.integrations.TorchweldInt4Config(group_size=32, method="mse")
        small = LlamaForCausalLM.from_pretrained("llama", quantization_config=config)
    """

    def __init__(
        self,
        group_size: int | None = 128,
        skip: Any = None,
        method: str = "rtn",
        left: list[str] | None = None,
        groups: dict[str, int] | None = None,
    ) -> None:
        register_quantizer()
        self.quant_method = METHOD
        self.group_size, self.method = group_size, method
        skip = self._int4(skip).skip
        self.skip = None if skip is None else list(skip)
        self.left, self.groups = left, dict(groups or {})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a config of a dict in config.json; ignores unknown keys, as of later versions."""
        known = {key: config_dict[key] for key in _SETTINGS if key in config_dict}
        return super().from_dict(known, *args, **kwargs)

    def int4(self) -> Int4:
        """Returns the settings for `torchweld.quantize_`."""
        return self._int4(self.skip)

    def _int4(self, skip: Any) -> Int4:
        return Int4(self.group_size, skip, self.method)


class TorchweldInt4Quantizer(HfQuantizer):
    """Replaces the linear layers of a model by Int4Linear layers while it is loaded.

    A quantised checkpoint is loaded into them. A float checkpoint's weights are quantised one by
    one as they are read, so that the float model is never in memory whole.
    """

    requires_calibration = False
    quantization_config: TorchweldInt4Config
    plan: Plan = {}
    gpu: torch.device | None = None  # where `upload` moves the model

    def update_device_map(self, device_map: Any) -> Any:
        """Reads a model for one GPU on the CPU, where its tensors are views of the mapped file."""
        if self.pre_quantized:
            self.gpu = _only_gpu(device_map)
        if self.gpu is None:
            return device_map
        self.read_map: dict[str, Any] = {"": "cpu"}
        return self.read_map

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        heads = self._new_heads(model, kwargs.get("checkpoint_files"))
        config.skip = None if config.skip is None else config.skip + heads
        config.left = None if config.left is None else config.left + heads
        int4 = config.int4()
        if not self.pre_quantized:
            _refuse_disk(kwargs.get("device_map"))
            tied = tied_layers(model)
            self.plan = {p: group for p, group in plan_layers(model, int4).items() if p not in tied}
            return
        left = {_in_base(model, path) for path in config.left or heads}
        groups = {_in_base(model, path): size for path, size in config.groups.items()}
        linears = [(p, m) for p, m in model.named_modules() if isinstance(m, linear_classes())]
        ignored = set()
        for path, module in linears:
            name = _in_base(model, path)
            if name in left or config.left is None and int4.skipped_by(path):
                continue
            layer = without_values(module, groups.get(name, config.group_size))
            model.set_submodule(path, layer)
            # An Int4Linear's state_dict has an empty "weight" that loading must ignore. One pattern
            # serves all blocks, because transformers tries every pattern with every key.
            ignored.add(re.sub(r"\d+", r"\\d+", re.escape(name)) + r"\.weight$")
        known = model._keys_to_ignore_on_load_unexpected
        known = [] if known is None else known  # a set since transformers 5.20
        model._keys_to_ignore_on_load_unexpected = type(known)({*known, *ignored})

    def _new_heads(self, model: PreTrainedModel, files: list[str] | None) -> list[str]:
        """Lists heads that a checkpoint lacks, as one of another task; they are to be trained."""
        if not files:
            return []
        known = {
            *(self.quantization_config.left or ()),
            *(n.rpartition(".")[0] for n in _tied(model)),
        }
        found = [path for path in heads_of(model) if path not in known]
        keys = _keys_of(files) if found else None
        name = "qweight" if self.pre_quantized else "weight"
        return [] if keys is None else [p for p in found if not _has(keys, f"{p}.{name}")]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._warn_of_buffers(model)
        if not self.pre_quantized:
            _refuse_disk(getattr(model, "hf_device_map", None))
            int4 = self.quantization_config.int4()
            quantize_layers(model, int4)  # layers whose weights the checkpoint lacks
            mark(model, int4)
            return
        _refuse_codes_on_disk(model)
        # Offloaded layers can't be checked: accelerate holds copies of their tensors without marks.
        layers = [(path, layer) for path, layer in _layers(model) if not _is_offloaded(layer)]
        for path, layer in layers:
            _check_loaded(path, layer)
        if self.gpu is not None:
            upload(model, self.gpu)
            self.read_map[""] = self.gpu  # transformers loads an adapter with this map next
        for _, layer in layers:
            layer.repack()

    def _warn_of_buffers(self, model: PreTrainedModel) -> None:
        """Warns that accelerate leaves offloaded layers' buffers on the device that computes."""
        offloaded = [layer for _, layer in _layers(model) if _is_offloaded(layer)]
        count = sum(not layer._hf_hook.offload_buffers for layer in offloaded)
        if count:
            warnings.warn(
                f"torchweld: the codes of {count} offloaded layers stay on the device that "
                "computes, since they are buffers; pass offload_buffers=True to from_pretrained",
                stacklevel=2,
            )

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        path, _, name = param_name.rpartition(".")
        return not self.pre_quantized and name == "weight" and path in self.plan

    @property
    def quantized_element_size(self) -> float:
        """Returns the bytes of a weight, with which device_map="auto" plans memory."""
        scale_and_zero = 2.5 / (self.quantization_config.group_size or 1024)
        return 0.5 + scale_and_zero

    def get_quantize_ops(self) -> ConversionOps:
        return _QuantizeLayer(self)

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        dequantize_layers(model)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:  # with adapters
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _QuantizeLayer(ConversionOps):
    """Replaces a linear layer when its weight has been read; the weight itself is not loaded."""

    def __init__(self, quantizer: TorchweldInt4Quantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        model: nn.Module | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        left = {}
        for name, given in input_dict.items():
            weight = given[0] if isinstance(given, list) else given
            if not self._replaced(model, name, weight):
                left[name] = given
            elif missing_keys is not None:
                missing_keys.discard(name)
        return left

    def _replaced(self, model: nn.Module, name: str, weight: Tensor) -> bool:
        path = name.rpartition(".")[0]
        if not self.quantizer.param_needs_quantization(model, name):
            return False
        old = model.get_submodule(path)
        if isinstance(old, Int4Linear):  # a shared layer's second path
            return True
        if weight.shape != old.weight.shape:
            expected, got = tuple(old.weight.shape), tuple(weight.shape)
            raise ValueError(f"torchweld: {name} must be {expected}, but got {got}")
        # transformers sorts names, so a bias on the meta device is not in the checkpoint.
        if old.bias is not None and old.bias.is_meta:
            return False
        config = self.quantizer.quantization_config.int4()
        weight = weight.to(old.weight.dtype)
        replace_layer(model, self.quantizer.plan[path], config, weight)
        return True


def _check_loaded(path: str, layer: Int4Linear) -> None:
    """Raises RuntimeError unless a layer has tensors of the checkpoint, in their dtypes."""
    # transformers marks the tensors that it has loaded; the others it only lists, without an error.
    if not all(getattr(t, "_is_hf_initialized", False) for t in layer.buffers()):
        raise RuntimeError(
            f"torchweld: the checkpoint must have the tensors of {path}, an Int4Linear by its "
            "quantization_config, but got a checkpoint without them"
        )
    for name in ("qweight", "zero"):
        if (dtype := getattr(layer, name).dtype) != torch.int32:
            raise RuntimeError(
                f"torchweld: {path}.{name} of the checkpoint must be int32, but got {dtype}"
            )


def register_quantizer() -> None:
    """Makes `TorchweldInt4Config` and its checkpoints known to transformers.

    Call it once, before `from_pretrained` loads a quantised checkpoint. Calling it again changes
    nothing.

    Raises:
        ImportError: transformers is missing or too old.
        RuntimeError: torchweld's operators can't be loaded.

    Example::

        torchweld.quantize_(model, torchweld.Int4(group_size=32))
        model.save_pretrained("llama-int4")
        torchweld.integrations.register_quantizer()
        loaded = LlamaForCausalLM.from_pretrained("llama-int4")
    """
    require()
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(TorchweldInt4Config)
        auto.register_quantizer(METHOD)(TorchweldInt4Quantizer)


def mark(model: PreTrainedModel, config: Int4) -> None:
    """Lets `save_pretrained` of a model with Int4Linear layers record them."""
    left = [path for path, module in model.named_modules() if isinstance(module, linear_classes())]
    groups = {
        path: layer.group_size
        for path, layer in _layers(model)
        if layer.group_size != (config.group_size or layer.in_features)
    }
    made = TorchweldInt4Config(config.group_size, config.skip, config.method, left, groups)
    model.config.quantization_config = made
    model.hf_quantizer = TorchweldInt4Quantizer(made, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, METHOD


def unmark(model: PreTrainedModel) -> None:
    """Undoes `mark`; another quantizer's config stays."""
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, TorchweldInt4Quantizer):
        quantizer.remove_quantization_config(model)


def _layers(model: nn.Module) -> list[tuple[str, Int4Linear]]:
    return [(path, m) for path, m in model.named_modules() if isinstance(m, Int4Linear)]


def _is_offloaded(layer: Int4Linear) -> bool:
    """Whether accelerate keeps a layer on another device than the one that computes."""
    return getattr(getattr(layer, "_hf_hook", None), "offload", False)


def _keys_of(files: list[str]) -> list[str] | None:
    """Lists the names of the tensors in safetensors files; None for files of another kind."""
    if not all(file.endswith(".safetensors") for file in files):
        return None
    keys: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            keys += opened.keys()
    return keys


def _has(keys: list[str], name: str) -> bool:
    """Whether a tensor is among the keys, maybe below a prefix."""
    return any(key == name or key.endswith(f".{name}") for key in keys)


def _only_gpu(device_map: Any) -> torch.device | None:
    """Returns the GPU where a device_map places all; else, or under torch.distributed, None."""
    if not isinstance(device_map, dict) or not device_map or "disk" in device_map.values():
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    devices = {torch.device(place) for place in device_map.values()}
    device = devices.pop()
    return None if devices or device.type != "cuda" else device


def _refuse_disk(device_map: Any) -> None:
    if isinstance(device_map, dict) and "disk" in device_map.values():
        raise ValueError(
            'torchweld: device_map must not have "disk" while a float checkpoint is quantised; '
            "quantise it without, then save_pretrained and load that with the device_map"
        )


def _refuse_codes_on_disk(model: PreTrainedModel) -> None:
    device_map = getattr(model, "hf_device_map", None) or {}
    if release() >= (5, 14) or "disk" not in device_map.values():
        return
    if any(layer._hf_hook.offload_buffers for _, layer in _layers(model) if _is_offloaded(layer)):
        raise ValueError(
            'torchweld: offload_buffers must be False with "disk" in device_map, but got True; '
            "transformers before 5.14 reads the 4-bit codes from the disk as floats"
        )


def _tied(model: PreTrainedModel) -> dict[str, str]:
    return getattr(model, "all_tied_weights_keys", None) or {}


def tied_layers(model: PreTrainedModel) -> set[str]:
    """Returns the paths of modules whose weights the config ties to others."""
    return {name.rpartition(".")[0] for pair in _tied(model).items() for name in pair}


def _in_base(model: PreTrainedModel, path: str) -> str:
    """Removes the base model's prefix from a path: paths in the base model have none."""
    return path.removeprefix(f"{model.base_model_prefix}.")
