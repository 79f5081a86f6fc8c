"""OutControl: record the input channels' norms, keep the largest ones in MXFP8 from then on (arXiv 2510.27527).

1. From step `record_start`, for `record_steps` steps, every training forward adds acc[c] += ‖X[:, c]‖₂.
2. The channels are sorted by falling acc (summed over all processes): the first k are "hi", the rest "lo", in that
order, so that an FP4
   block holds channels of similar size. The choice is final and is saved with the weights.
"""

import logging

import torch
from torch import nn

from .configuration_tetrajet_v2 import TetraJetConfig
from .linear import TetraJetLayer, iter_layers

__all__ = ["OutControl"]

logger = logging.getLogger(__name__)


class OutControl:
    """The engine; call `begin(step)` before and `step(i)` after each optimizer step.

    Args:
        model (`nn.Module`): A converted model.
        config (`TetraJetConfig`, *optional*): Default: the model's own.

    Raises:
        ValueError: If the model has no quantized layers.

    Example:
        ```python
        >>> import torch
        >>> import hf_models.tetrajet_v2 as tj
        >>> config = tj.TetraJetConfig("tetrajet_v2", out_control={"record_start": 0, "record_steps": 1})
        >>> model = tj.prepare_model(torch.nn.Sequential(torch.nn.Linear(64, 16)), config)
        >>> engine = tj.OutControl(model)
        >>> engine.begin(0)
        >>> x = torch.ones(4, 64)
        >>> x[:, 7] = 50
        >>> _ = model(x)
        >>> engine.step(0)
        True
        >>> int(model[0].hi_idx[0])
        7

        ```
    """

    def __init__(self, model: nn.Module, config: TetraJetConfig | None = None) -> None:
        if config is None:
            config = next((layer.recipe for _, layer in iter_layers(model)), None)
            if config is None:
                raise ValueError("model has no quantized layers: call prepare_model(model, config) first")
        self.model, self.config = model, config.out_control
        self.first_step: int | None = None  # optimizer step at which recording began
        self._norms: dict[str, torch.Tensor] = {}
        if self.config.enabled:
            small = [name for name, layer in iter_layers(model) if "hi_idx" not in layer._buffers]
            if small:
                logger.info("layers too narrow for outlier channels stay pure FP4: %s", ", ".join(small))

    def _layers(self) -> list[tuple[str, TetraJetLayer]]:
        layers = iter_layers(self.model)
        return [(n, layer) for n, layer in layers if layer.mode == "master" and "hi_idx" in layer._buffers]

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to select."""
        return not self.config.enabled or all(layer._has_outliers for _, layer in self._layers())

    def begin(self, step: int) -> None:
        """Before the forward passes of an optimizer step: start or go on recording if it is time.

        Args:
            step (`int`): Optimizer steps done so far.
        """
        if self.is_done or step < self.config.record_start:
            return
        if self.first_step is None:
            self.first_step = step
            if step > self.config.record_start:
                logger.warning(
                    "OutControl: step %d is past record_start=%d without a saved recording; recording %d steps now",
                    step,
                    self.config.record_start,
                    self.config.record_steps,
                )
        for name, layer in self._layers():
            if layer.recorder is None:
                layer.recorder = _Recorder(self._norms, name)

    @torch.no_grad()
    def step(self, i: int) -> bool:
        """After an optimizer step: select once enough steps are recorded.

        Args:
            i (`int`): Index of the step just done, from 0.

        Returns:
            `bool`: `True` when the channels were selected now.
        """
        if self.first_step is None or self.is_done or i + 1 < self.first_step + self.config.record_steps:
            return False
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        for name, layer in self._layers():
            layer.recorder = None
            acc = self._norms.get(name)
            if acc is None:
                acc = torch.zeros(layer.size()[1], device=layer.hi_idx.device)
            if distributed:
                torch.distributed.all_reduce(acc)
            layer.select(acc.sort(descending=True, stable=True).indices)
        self._norms.clear()
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """State of an unfinished recording.

        Returns:
            `dict[str, torch.Tensor]`: Tensors by name.
        """
        first = -1 if self.first_step is None else self.first_step
        return {"first_step": torch.tensor(first), **{f"{name}/norms": acc for name, acc in self._norms.items()}}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore `state_dict`.

        Args:
            tensors (`dict[str, torch.Tensor]`): What `state_dict` gave.
        """
        first = int(tensors["first_step"])
        self.first_step = None if first < 0 else first
        self._norms.clear()
        for name, layer in self._layers():
            if f"{name}/norms" in tensors:
                self._norms[name] = tensors[f"{name}/norms"].to(layer.hi_idx.device).clone()


class _Recorder:
    """acc[c] += ‖X[:, c]‖₂ of one layer."""

    def __init__(self, norms: dict[str, torch.Tensor], name: str) -> None:
        self.norms, self.name = norms, name

    def __call__(self, x: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        norm = torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]).to(torch.float32), dim=0)
        acc = self.norms.get(self.name)
        self.norms[self.name] = norm if acc is None else acc.add_(norm)
