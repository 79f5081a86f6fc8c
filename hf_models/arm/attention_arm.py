"""The attention of ARM layers: registered functions, rotary embedding, and the four backbones' attention with
memory."""

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .cache_arm import ArmCache, ArmFullLayer
from .configuration_arm import ArmConfig
from .memory_arm import ArmMemory

# ---- the registered attention and mask functions -------------------------------------------------


def arm_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function `"arm"`: rotated queries (B, H, T, d), keys and values (B, K, T, d) of the new tokens.

    Layers without memory (`arm_layers`) use scaled dot-product attention over their own growing cache.

    Raises:
        ValueError: The module has no memory.
    """
    memory = getattr(module, "arm", None)
    if memory is not None:
        return memory(
            kwargs["memory_hidden_states"],
            kwargs["memory_queries"],
            kwargs["memory_keys"],
            value,
            query,
            key,
            kwargs["memory_rotation"],
            attention_mask,
            scaling,
            kwargs["memory_layer"],
            dropout,
        )
    if not isinstance(module, ArmAttentionMixin):
        raise ValueError(
            'attn_implementation="arm" needs a memory in each layer: make the model with convert_to_arm(model), or '
            "load an ARM folder with AutoModelForCausalLM.from_pretrained."
        )
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)


def arm_mask(
    batch_size: int, q_length: int, attention_mask: torch.Tensor | None = None, **kwargs
) -> torch.Tensor | None:
    """The mask function `"arm"`: which of the new tokens are real, (B, T) bool, or `None` for all."""
    return None if attention_mask is None else attention_mask[:, -q_length:]


AttentionInterface.register("arm", arm_attention_forward)
AttentionMaskInterface.register("arm", arm_mask)


# ---- layers --------------------------------------------------------------------------------------


class ArmRotary(nn.Module):
    """A backbone's rotary embedding that also gives the constant rotation of the memory query.

    Args:
        rotary (`nn.Module`): The backbone's own embedding, with its scaling of frequencies and of the attention.
        distance (`int`): Δ, the distance at which every slot appears.
    """

    def __init__(self, rotary: nn.Module, distance: int):
        super().__init__()
        self.rotary = rotary
        self.distance = distance

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """cos and sin of the positions (B, T, d) and of Δ (d,), the latter in float32."""
        cos, sin = self.rotary(x, position_ids)
        angle = (self.distance * self.rotary.inv_freq.float()).repeat(2)
        scale = self.rotary.attention_scaling**2  # of query and key: the slots' keys are not rotated
        return cos, sin, angle.cos() * scale, angle.sin() * scale


class ArmAttentionMixin:
    """Attention of a backbone (`q_proj`, `k_proj`, `v_proj`, `o_proj`, optional norms) over a routed memory."""

    def __init__(self, config: ArmConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.arm = ArmMemory(config) if config.has_memory(layer_idx) else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: torch.Tensor | None = None,
        cache: ArmCache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states (B, T, D) to attention output (B, T, D) and, for a single token, its probabilities."""
        rotation = position_embeddings[2:]
        if self.config._attn_implementation != "arm":  # inside `full_attention`: the backbone as it was
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings[:2],
                attention_mask=attention_mask,
                cache=cache,
                **kwargs,
            )
        valid = attention_mask
        if valid is None:
            valid = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
        layer = None if cache is None else cache.layers[self.layer_idx]
        if self.arm is None:
            valid = layer.note(valid) if isinstance(layer, ArmFullLayer) else valid
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings[:2],
                attention_mask=causal_mask(valid, hidden_states.shape[1]),
                cache=cache,
                **kwargs,
            )
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self._normed("q", self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        k = self._normed("k", self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        q_rot, k_rot = apply_rotary_pos_emb(q, k, *position_embeddings[:2])
        output, weights = arm_attention_forward(
            self,
            q_rot,
            k_rot,
            v,
            valid,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            memory_hidden_states=hidden_states,
            memory_queries=q,
            memory_keys=k,
            memory_rotation=rotation,
            memory_layer=layer,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = getattr(self, f"{name}_norm", None)
        return x if norm is None else norm(x)


def causal_mask(valid: torch.Tensor, queries: int) -> torch.Tensor:
    """Mask (B, 1, T, columns) bool of the last `queries` columns over all real earlier ones and themselves."""
    columns = torch.arange(valid.shape[1], device=valid.device)
    rows = columns[-queries:, None]
    return (((columns <= rows) & valid[:, None]) | (columns == rows))[:, None]


class ArmLlamaAttention(ArmAttentionMixin, LlamaAttention):
    """Llama's attention with memory."""


class ArmQwen2Attention(ArmAttentionMixin, Qwen2Attention):
    """Qwen2's attention with memory."""


class ArmQwen3Attention(ArmAttentionMixin, Qwen3Attention):
    """Qwen3's attention with memory, on normed queries and keys."""


class ArmMistralAttention(ArmAttentionMixin, MistralAttention):
    """Mistral's attention with memory."""
