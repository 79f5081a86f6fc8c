"""OsciReset: put weights whose 4-bit value keeps flipping, while the master weight hardly moves, on the bin's centre.

One window of W steps in every period of P (arXiv 2510.27527):

    step index i, counted from 0 after each optimizer step;  phase = i mod P, from the first period at or after `start`
    phase 0       w_prev = w; q_prev = Q2(w); D_w = D_q = 0
    phase 1 … W   D_w += |w − w_prev|; D_q += |Q2(w) − q_prev|; roll prev
    phase W + 1   ρ = D_q/D_w (0 where D_w = 0); where ρ ≥ τ: w ← Q2(w); drop the state

Q2 is the forward pass's own quantizer, on the `lo` columns only when a layer has outlier channels. The optimizer's
moments are left alone: this re-centres a weight, it does not freeze it. Q2(Q2(w)) = Q2(w), so a reset changes no other
weight's 4-bit value.
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import nn

from .configuration_tetrajet_v2 import OsciResetConfig, TetraJetConfig
from .formats import E2M1_VALUES
from .functional import q2, quantize_weight_codes
from .linear import TetraJetLayer, iter_layers

__all__ = ["OsciReset", "edge_closeness", "lo_weight", "trainable_layers"]

logger = logging.getLogger(__name__)


def local_matrix(layer: TetraJetLayer, name: str) -> torch.Tensor:
    """The weight as a matrix on this process: itself, or the row shard of a `DTensor`.

    Args:
        layer (`TetraJetLayer`): The layer.
        name (`str`): Its name, for messages.

    Returns:
        `torch.Tensor`: View `(rows, in)` that shares memory with the parameter.

    Raises:
        RuntimeError: If the weight is sharded in a way that cuts quantization blocks.
    """
    weight = layer.weight
    if hasattr(weight, "to_local"):
        rows_only = all(p.is_replicate() or p.is_shard(0) for p in weight.placements)
        if not rows_only or layer.recipe.outer_block_size == -1 or layer.recipe.weight_block_2d:
            raise RuntimeError(
                f"{name}.weight: OsciReset needs whole rows on each process and 1×128 blocks; it is sharded as "
                f"{weight.placements} with outer_block_size={layer.recipe.outer_block_size}. "
                "Shard it with FSDP2 along dim 0."
            )
        return weight.to_local()
    if weight.dim() != 2:
        raise RuntimeError(
            f"{name}.weight has {weight.dim()} dims: FSDP1 flattens and cuts rows, so blocks cannot be quantized. "
            "Use FSDP2 (fully_shard), DDP, or run OsciReset inside FSDP.summon_full_params."
        )
    return layer.matrix()


def lo_weight(layer: TetraJetLayer, name: str) -> torch.Tensor:
    """FP32 copy of the columns that Q2 quantizes.

    Args:
        layer (`TetraJetLayer`): The layer.
        name (`str`): Its name, for messages.

    Returns:
        `torch.Tensor`: `(rows, K_lo)`.
    """
    w = local_matrix(layer, name).detach().to(torch.float32)
    outliers = layer.outliers
    return w.clone() if outliers is None else w.index_select(1, outliers.lo)


def write_lo_weight(layer: TetraJetLayer, name: str, mask: torch.Tensor, values: torch.Tensor) -> None:
    """w ← values where the mask is set, on the columns that Q2 quantizes.

    Args:
        layer (`TetraJetLayer`): The layer.
        name (`str`): Its name, for messages.
        mask (`torch.Tensor`): Bool, `(rows, K_lo)`.
        values (`torch.Tensor`): FP32, `(rows, K_lo)`.
    """
    row, column = mask.nonzero(as_tuple=True)
    new = values[row, column]
    if layer.outliers is not None:
        column = layer.outliers.lo.long()[column]
    w = local_matrix(layer, name)
    with torch.no_grad():
        w[row, column] = new.to(w.dtype)


def trainable_layers(model: nn.Module) -> list[tuple[str, TetraJetLayer]]:
    """Layers with a trainable FP4 master weight, each parameter once.

    Args:
        model (`nn.Module`): The model.

    Returns:
        `list[tuple[str, TetraJetLayer]]`: Names and layers.
    """
    found, seen = [], set()
    for name, layer in iter_layers(model):
        if layer.mode != "master" or not layer.recipe.is_on("Q2"):
            continue
        if layer.weight.requires_grad and id(layer.weight) not in seen:
            seen.add(id(layer.weight))
            found.append((name, layer))
    return found


def edge_closeness(w: torch.Tensor, recipe: TetraJetConfig) -> torch.Tensor:
    """How near each weight is to the edge of its bin: e = |t − v|/(2h), 0 at the centre, 0.5 on the edge.

    Args:
        w (`torch.Tensor`): FP32 matrix.
        recipe (`TetraJetConfig`): The recipe, for Q2.

    Returns:
        `torch.Tensor`: e, of the shape of `w`; 2h is the gap to the neighbour on t's side, and 2 outside ±6.
    """
    q = quantize_weight_codes(w, recipe)
    scale = q.scales().repeat_interleave(16, dim=1)[:, : w.shape[1]]
    t = (w / torch.where(scale == 0, torch.inf, scale)).abs()
    magnitude = E2M1_VALUES[:8].to(w.device)
    v = magnitude[(q.unpacked_codes() & 7).long()]
    outward = t > v
    gap = torch.where(outward, torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0)), 0.0)
    gap = torch.where(outward, gap, torch.where(v <= 2, 0.5, torch.where(v <= 4, 1.0, 2.0)))
    return (t - v).abs_().div_(gap)


_FIELDS = ("shape", "w_prev", "q_prev", "d_w", "d_q", "index")


@dataclass
class _Window:
    """What is tracked of one weight of this `shape`: all of it, or the entries `index` of the flattened matrix."""

    shape: torch.Tensor
    w_prev: torch.Tensor
    q_prev: torch.Tensor
    d_w: torch.Tensor
    d_q: torch.Tensor
    index: torch.Tensor | None = None

    def update(self, w: torch.Tensor, q: torch.Tensor) -> None:
        """D += |new − previous|; previous = new."""
        if self.index is not None:
            w, q = w.view(-1)[self.index], q.view(-1)[self.index]
        for previous, distance, new in ((self.w_prev, self.d_w, w), (self.q_prev, self.d_q, q)):
            distance.add_(previous.sub_(new).abs_())
            previous.copy_(new)

    def ratio(self) -> torch.Tensor:
        """ρ = D_q/D_w, 0 where the weight did not move."""
        return torch.where(self.d_w > 0, self.d_q / self.d_w, 0.0)


class OsciReset:
    """The engine; call `step(i)` after each applied optimizer step.

    Args:
        model (`nn.Module`): A converted model.
        config (`TetraJetConfig` or `OsciResetConfig`, *optional*): Default: the model's own.
        total_steps (`int`, *optional*): Steps of the whole training, needed when `start` is a share.

    Raises:
        ValueError: If `start` is a share and `total_steps` is missing, or the model has no quantized layers.

    Example:
        ```python
        >>> import torch
        >>> import hf_models.tetrajet_v2 as tj
        >>> model = tj.prepare_model(torch.nn.Sequential(torch.nn.Linear(32, 16)), "tetrajet_v2_base")
        >>> engine = tj.OsciReset(model, tj.OsciResetConfig(start=0, period=4, window=2))
        >>> [engine.step(i) is not None for i in range(5)]  # the first window ends at step index 3
        [False, False, False, True, False]

        ```
    """

    def __init__(
        self,
        model: nn.Module,
        config: TetraJetConfig | OsciResetConfig | None = None,
        total_steps: int | None = None,
    ) -> None:
        if config is None:
            config = next((layer.recipe for _, layer in iter_layers(model)), None)
            if config is None:
                raise ValueError("model has no quantized layers: call prepare_model(model, config) first")
        self.model = model
        self.config = config.osci_reset if isinstance(config, TetraJetConfig) else config
        start = self.config.start
        if isinstance(start, float):
            if total_steps is None:
                raise ValueError(f"total_steps is needed because osci_reset.start={start} is a share of all steps")
            start = int(start * total_steps)
        self.start = start
        self.num_resets = 0
        self._windows: dict[str, _Window] = {}

    def step(self, i: int) -> dict[str, int] | None:
        """Advance by one optimizer step.

        Args:
            i (`int`): Index of the optimizer step that was just applied, from 0.

        Returns:
            `dict[str, int]` or `None`: At the end of a window, or at each `"bin_edge"` reset: layer → weights that
            were reset.
        """
        for state in {id(s): s for s in (layer.state for _, layer in iter_layers(self.model))}.values():
            state.set_step(i + 1)
        return self.update(i)

    @torch.no_grad()
    def update(self, i: int) -> dict[str, int] | None:
        """`step` without advancing the noise counters (callbacks do that themselves).

        Args:
            i (`int`): Index of the optimizer step that was just applied, from 0.

        Returns:
            `dict[str, int]` or `None`: As `step`.
        """
        if i < self.start or not self.config.enabled:
            return None
        phase = i % self.config.period
        if self.config.detect == "bin_edge":
            return self._reset_near_edges() if phase == 0 else None
        if phase == 0:
            self._open()
        elif self._windows and phase <= self.config.window:
            self._track()
        elif self._windows:  # phase W + 1; later only if that step was skipped
            return self._close()
        return None

    def _open(self) -> None:
        self._windows = {}
        for name, layer in trainable_layers(self.model):
            w = lo_weight(layer, name)
            q = q2(w, layer.recipe)
            shape, index = torch.tensor(w.shape), None
            if self.config.detect == "distance_ratio_mem_eff":
                k = math.ceil(w.numel() * self.config.sample_percent / 100)
                index = edge_closeness(w, layer.recipe).view(-1).topk(k, sorted=False).indices.sort().values
                index = index.to(torch.int32) if w.numel() < 2**31 else index
                w, q = w.view(-1)[index], q.view(-1)[index]
            self._windows[name] = _Window(shape, w, q, torch.zeros_like(w), torch.zeros_like(q), index)

    def _tracked(self):
        """Yield name, layer, window and weight of every tracked layer; a window whose columns changed is dropped."""
        for name, layer in trainable_layers(self.model):
            window = self._windows.get(name)
            if window is None:
                continue
            w = lo_weight(layer, name)
            if tuple(w.shape) == tuple(window.shape.tolist()):
                yield name, layer, window, w
            else:
                logger.info("%s: outlier channels were selected inside a window, its tracking stops", name)
                del self._windows[name]

    def _track(self) -> None:
        for _, layer, window, w in self._tracked():
            window.update(w, q2(w, layer.recipe))

    def _close(self) -> dict[str, int]:
        counts = {}
        for name, layer, window, w in self._tracked():
            chosen = window.ratio() >= self.config.threshold
            if window.index is not None:
                mask = torch.zeros(w.numel(), dtype=torch.bool, device=w.device)
                mask[window.index[chosen].long()] = True
                chosen = mask.view(w.shape)
            counts[name] = self._reset(layer, name, chosen, w)
        self._windows = {}
        return self._report(counts)

    def _reset_near_edges(self) -> dict[str, int]:
        counts = {}
        for name, layer in trainable_layers(self.model):
            w = lo_weight(layer, name)
            chosen = edge_closeness(w, layer.recipe) > self.config.edge_threshold
            counts[name] = self._reset(layer, name, chosen, w)
        return self._report(counts)

    def _reset(self, layer: TetraJetLayer, name: str, chosen: torch.Tensor, w: torch.Tensor) -> int:
        write_lo_weight(layer, name, chosen, q2(w, layer.recipe))  # w ← Q2(w)
        return int(chosen.sum())

    def _report(self, counts: dict[str, int]) -> dict[str, int]:
        total = sum(counts.values())
        self.num_resets += total
        logger.info("OsciReset put %d weights on their bin centres", total)
        return counts

    @property
    def is_tracking(self) -> bool:
        """Whether a window is open."""
        return bool(self._windows)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """State of the open window, to continue exactly after a restart.

        Returns:
            `dict[str, torch.Tensor]`: Tensors by name; only the counter outside a window.
        """
        tensors = {"num_resets": torch.tensor(self.num_resets)}
        for name, window in self._windows.items():
            for key in _FIELDS:
                value = getattr(window, key)
                if value is not None:
                    tensors[f"{name}/{key}"] = value.contiguous()
        return tensors

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore `state_dict`.

        Args:
            tensors (`dict[str, torch.Tensor]`): What `state_dict` gave.
        """
        self.num_resets = int(tensors["num_resets"])
        self._windows = {}
        for name, layer in trainable_layers(self.model):
            if f"{name}/w_prev" in tensors:
                device = layer.weight.device
                parts = {key: tensors.get(f"{name}/{key}") for key in _FIELDS}
                self._windows[name] = _Window(
                    **{k: None if v is None else v.to(device).clone() for k, v in parts.items()}
                )
