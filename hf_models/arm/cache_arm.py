"""The cache of ARM models: a constant number of bytes per layer, whatever the context length."""

import json
import os
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.utils import is_torchdynamo_compiling, logging

from .configuration_arm import ArmConfig
from .ops_arm import ArmState, Writes
from .scan_arm import advance, empty_state
from .training_free_arm import training_free_write_

logger = logging.get_logger(__name__)
MAX_ROLLBACK = 1024  # tokens that a recording cache can take back


class ArmCacheLayer(CacheLayerMixin):
    """The memory of one layer: slots, exact window, sinks and counters, changed in place.

    Args:
        config (`ArmConfig`): The model's configuration.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(self, config: ArmConfig):
        super().__init__()
        self.config = config
        self.state: ArmState | None = None
        self.directions: torch.Tensor | None = None  # of the training-free mode, to replay writes
        self.cumulative_length = torch.tensor(0)  # columns seen, padding included
        self.record_past = False
        self._snapshot: ArmState | None = None
        self._log: list[Writes] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the state for keys (B, K, T, d) and values (B, K, T, d_v)."""
        config = self.config
        self.device = key_states.device
        self.batch_size = key_states.shape[0]
        self.state = empty_state(
            *key_states.shape[:2],
            key_states.shape[-1],
            value_states.shape[-1],
            config.arm_buckets,
            config.arm_slots_per_bucket,
            config.arm_window,
            config.arm_sinks,
            key_states.dtype,
            key_states.device,
            getattr(torch, config.arm_state_dtype),
            raw_keys=config.arm_mode == "training_free",
        )
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not is_torchdynamo_compiling():
            for tensor in (*self._tensors().values(), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.state._asdict().items() if value is not None}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Refused: what a token writes is decided by the memory of its layer, not by its key and value alone."""
        raise ValueError("ArmCache is filled by ARM attention layers; use it with a model made by convert_to_arm.")

    def note(self, writes: Writes) -> None:
        """Count new columns, and log them where a later `crop` may take them back."""
        if self.record_past:
            if self._snapshot is None:
                self._snapshot = _map(self.state, torch.Tensor.clone)
            self._log.append(Writes(*(None if x is None else x.detach().clone() for x in writes)))
            while len(self._log) > 1 and self._logged() - self._log[0].valid.shape[1] >= MAX_ROLLBACK:
                self._snapshot = self._replay(self._snapshot, self._log.pop(0))
        elif self._snapshot is not None:
            self._forget()
        self.cumulative_length.add_(writes.valid.shape[1])

    def assign(self, state: ArmState) -> None:
        """Take over the values of another state, in place and detached."""
        for mine, new in zip(self.state, state, strict=True):
            if mine is not None:
                mine.copy_(new.detach())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new tokens only; the state knows which old ones are real."""
        return query_length, 0

    def get_seq_length(self) -> int | torch.Tensor:
        """Columns seen, padding included (a tensor while compiling)."""
        return self.cumulative_length if is_torchdynamo_compiling() else int(self.cumulative_length)

    def get_max_length(self) -> int:
        """-1: there is no longest context."""
        return -1

    # ---- rollback ----

    def activate_past_recording(self) -> None:
        """Remember from now on what is written, so that `crop` can take it back."""
        self.record_past = True

    def _logged(self) -> int:
        return sum(writes.valid.shape[1] for writes in self._log)

    def _forget(self) -> None:
        self._snapshot, self._log = None, []

    def _replay(self, state: ArmState, writes: Writes) -> ArmState:
        if writes.gate is not None:
            return advance(state, writes, self.config.arm_chunk)
        state = _map(state, torch.Tensor.clone)
        for t in range(writes.valid.shape[1]):
            training_free_write_(state, _columns(writes, t, t + 1), self.directions)
        return state

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns; 0 only forgets the log.

        Raises:
            ValueError: The number is positive, or more than was recorded since the last `crop`.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative integer.")
        remove, logged = -tokens_to_remove, self._logged()
        if remove > logged:
            raise ValueError(
                f"crop({tokens_to_remove}) goes back further than the {logged} tokens recorded since the last crop; "
                "call cache.activate_past_recording() before feeding tokens that may be taken back."
            )
        if not self.is_initialized:
            return
        if remove > 0:
            state, keep = self._snapshot, logged - remove
            for writes in self._log:
                state = self._replay(state, _columns(writes, 0, keep)) if keep > 0 else state
                keep -= writes.valid.shape[1]
            self.assign(state)
            self.cumulative_length.sub_(remove)
        self._forget()

    # ---- moving the rows and the bytes: every tensor, not only keys and values ----

    def _apply(self, move) -> None:
        """Replace every tensor by `move(tensor)`, also those kept for a rollback."""
        if not self.is_initialized:
            return
        self.state = _map(self.state, move)
        self.batch_size = self.state.sn.shape[0]
        if self._snapshot is not None:
            self._snapshot = _map(self._snapshot, move)
            self._log = [Writes(*(None if x is None else move(x) for x in writes)) for writes in self._log]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes the old row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._apply(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._apply(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to its device."""
        self._apply(lambda x: x.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forget everything; the tensors keep their addresses."""
        if self.is_initialized:
            for tensor in self._tensors().values():
                tensor.zero_()
            self.cumulative_length.zero_()
        self._forget()

    def nbytes(self) -> int:
        """Bytes of the state; 0 before the first token."""
        return sum(x.numel() * x.element_size() for x in self._tensors().values()) if self.is_initialized else 0


class ArmFullLayer(DynamicLayer):
    """A layer with full attention in an ARM model (`arm_layers`): a growing cache that knows its padding."""

    def __init__(self):
        super().__init__()
        self.valid: torch.Tensor | None = None  # (B, columns) bool

    def note(self, valid: torch.Tensor) -> torch.Tensor:
        """Append the validity of new columns (B, T) and return that of all."""
        self.valid = valid if self.valid is None else torch.cat((self.valid, valid), 1)
        self.batch_size = self.valid.shape[0]
        return self.valid

    def nbytes(self) -> int:
        """Bytes of keys, values and validity."""
        tensors = (self.keys, self.values, self.valid) if self.is_initialized else ()
        return sum(x.numel() * x.element_size() for x in tensors)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.valid = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns."""
        super().crop(tokens_to_remove)
        if tokens_to_remove < 0 and self.valid is not None:
            self.valid = self.valid[:, :tokens_to_remove]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes the old row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        super().batch_select_indices(indices)
        self.note_rows(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self.note_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def note_rows(self, move) -> None:
        """Let the validity follow the rows."""
        if self.valid is not None:
            self.valid = move(self.valid)
            self.batch_size = self.valid.shape[0]


class ArmCache(Cache):
    """Fixed-size cache of an ARM model, in the place of `DynamicCache`.

    `generate` makes one by itself; pass your own to go on with a conversation, or to read a long document once and ask
    many questions (`copy`, `save`, `load`). It holds detached values: no gradient flows from one call to the next.

    Args:
        config (`ArmConfig`): `model.config` of an ARM model.

    Raises:
        ValueError: The configuration is not that of an ARM model.

    Example:
        ```python
        cache = ArmCache(model.config)
        model.generate(**first_turn, cache=cache)
        cache.save("conversation.safetensors")
        ```
    """

    def __init__(self, config: PreTrainedConfig):
        if not hasattr(config, "arm_slots"):  # by its fields: a folder with code may load its configuration twice
            raise ValueError(
                f"ArmCache(config) needs the configuration of an ARM model, got {type(config).__name__}; "
                "convert the model with convert_to_arm first."
            )
        if config.arm_layers is not None:
            logger.warning_once("Layers outside arm_layers keep full attention: this cache grows with the context.")
        self.config = config
        depth = config.num_hidden_layers
        super().__init__([ArmCacheLayer(config) if config.has_memory(i) else ArmFullLayer() for i in range(depth)])

    @property
    def signature(self) -> dict[str, Any]:
        """The settings that another cache must share to be exchangeable with this one."""
        return cache_signature(self.config)

    def next_positions(self, length: int) -> torch.Tensor | None:
        """Positions of the next `length` tokens, counting real tokens only, (B, length); `None` while empty."""
        for layer in self.layers:
            if isinstance(layer, ArmCacheLayer) and layer.is_initialized:
                return layer.state.sn[:, None] + torch.arange(length, device=layer.state.sn.device)
        return None

    def nbytes(self) -> int:
        """Bytes of all state tensors; constant once the first token is in (unless `arm_layers` leaves full layers)."""
        return sum(layer.nbytes() for layer in self.layers)

    def slot_report(self) -> list[dict[str, float]]:
        """Use of the slots, one entry per layer with memory.

        Returns:
            `list[dict]`: `layer`; `occupied`, share of slots that hold something; `mass`, mean mass of those;
            `writes`, tokens written; `bucket_entropy`, entropy of the writes over buckets divided by log G, averaged
            over kv heads (1 is even use; a router below 0.5 is collapsing, which is logged as a warning).
        """
        report = []
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, ArmCacheLayer) or not layer.is_initialized:
                continue
            state = layer.state
            entropy = bucket_entropy(state.ev.sum(0).double())
            held = state.c > 0
            if entropy < 0.5 and state.ev.sum() >= 10 * state.ev.numel():  # after a few writes it means nothing
                logger.warning(
                    f"layer {index}: bucket entropy {entropy:.2f}; the router sends most tokens to few buckets."
                )
            report.append(
                {
                    "layer": index,
                    "occupied": float(held.float().mean()),
                    "mass": float(state.c[held].mean()) if held.any() else 0.0,
                    "writes": int(state.ev.sum()),
                    "bucket_entropy": entropy,
                }
            )
        return report

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns of every layer, or of none.

        Raises:
            ValueError: As for [`ArmCacheLayer.crop`].
        """
        memories = [layer for layer in self.layers if isinstance(layer, ArmCacheLayer)]
        for layer in (*memories, *(layer for layer in self.layers if not isinstance(layer, ArmCacheLayer))):
            layer.crop(tokens_to_remove)  # memories first: they alone can refuse

    def copy(self) -> "ArmCache":
        """A detached clone, for asking several questions about one processed text."""
        other = ArmCache(self.config)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if not mine.is_initialized:
                continue
            for name in ("device", "batch_size", "is_initialized"):
                setattr(theirs, name, getattr(mine, name))
            if isinstance(mine, ArmCacheLayer):
                theirs.state = _map(mine.state, lambda x: x.detach().clone())
                theirs.cumulative_length = mine.cumulative_length.clone()
                theirs.directions, theirs.record_past = mine.directions, mine.record_past
            else:
                theirs.keys, theirs.values = mine.keys.detach().clone(), mine.values.detach().clone()
                theirs.valid = mine.valid.clone()
        return other

    def save(self, path: str | os.PathLike) -> None:
        """Write the state as one safetensors file.

        Raises:
            ValueError: The cache is empty, or grows (`arm_layers`).
        """
        if self.config.arm_layers is not None:
            raise ValueError("a cache with full-attention layers (arm_layers) cannot be saved.")
        if not self.is_initialized:
            raise ValueError("the cache is empty: feed it tokens before saving it.")
        tensors = {}
        for index, layer in enumerate(self.layers):
            tensors |= {f"{index}.{name}": value.contiguous() for name, value in layer._tensors().items()}
            tensors[f"{index}.cumulative_length"] = layer.cumulative_length
        save_file(tensors, path, metadata={"arm": json.dumps(self.signature)})

    @classmethod
    def load(cls, path: str | os.PathLike, config: PreTrainedConfig, device: torch.device | str = "cpu") -> "ArmCache":
        """Read a cache written by [`~ArmCache.save`].

        Args:
            path (`str` or `PathLike`): The file.
            config (`ArmConfig`): Configuration of the model that goes on with it.
            device (`torch.device` or `str`, defaults to `"cpu"`): Where the state goes.

        Raises:
            ValueError: The file is no ARM cache, or belongs to a model with other settings.
        """
        cache = cls(config)
        with safe_open(path, framework="pt", device=str(device)) as file:
            saved = json.loads((file.metadata() or {}).get("arm", "null"))
            if saved != cache.signature:
                raise ValueError(f"{path} holds a cache for {saved}, but this model needs {cache.signature}.")
            for index, layer in enumerate(cache.layers):
                names = [name for name in ArmState._fields if f"{index}.{name}" in file.keys()]  # noqa: SIM118
                layer.state = ArmState(**{name: file.get_tensor(f"{index}.{name}") for name in names})
                layer.cumulative_length = file.get_tensor(f"{index}.cumulative_length")
                layer.device, layer.batch_size = layer.state.sn.device, layer.state.sn.shape[0]
                layer.is_initialized = True
        return cache


def cache_signature(config: ArmConfig) -> dict[str, Any]:
    """What the shape of a cache depends on."""
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.arm_head_dim,
        "buckets": config.arm_buckets,
        "slots_per_bucket": config.arm_slots_per_bucket,
        "window": config.arm_window,
        "sinks": config.arm_sinks,
        "mode": config.arm_mode,
        "state_dtype": config.arm_state_dtype,
        "arm_layers": config.arm_layers,
    }


def bucket_entropy(counts: torch.Tensor) -> float:
    """−Σ u log u / log n over shares u of counts (K, n), averaged over heads; 1 where there is nothing to choose."""
    if counts.shape[-1] == 1 or counts.sum() == 0:
        return 1.0
    shares = counts / counts.sum(-1, keepdim=True).clamp_min(1)
    return float(-(shares * shares.clamp_min(1e-12).log()).sum(-1).mean() / torch.tensor(counts.shape[-1]).log())


def _map(state: ArmState, move) -> ArmState:
    return ArmState(*(None if x is None else move(x) for x in state))


def _columns(writes: Writes, start: int, stop: int) -> Writes:
    """The tokens of some columns."""
    cut = [None if x is None else x[:, :, start:stop] for x in writes[:-1]]
    return Writes(*cut, writes.valid[:, start:stop])
