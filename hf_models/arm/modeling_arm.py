"""Causal language models whose attention reads a routed memory of fixed size (ARM, arXiv 2609.24417)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg

from .attention_arm import (
    ArmLlamaAttention,
    ArmMistralAttention,
    ArmQwen2Attention,
    ArmQwen3Attention,
    ArmRotary,
)
from .cache_arm import ArmCache
from .configuration_arm import ArmConfig, ArmLlamaConfig, ArmMistralConfig, ArmQwen2Config, ArmQwen3Config
from .inputs_arm import PackedRows, check_inputs, real_positions
from .memory_arm import ArmMemory, ArmStats

logger = logging.get_logger(__name__)


# ---- models --------------------------------------------------------------------------------------


@dataclass
class ArmModelOutput(BaseModelOutputWithPast):
    """Output of a backbone with memory.

    Args:
        balance_loss, read_cost, gate_mean (`torch.Tensor`): Scalars, means over layers; the first two `None` for a
            single token with a cache, and for it the third too.
        read_buckets (`torch.Tensor`): Buckets read, mean over layers and kv heads, (B, T); columns as in the input.
    """

    balance_loss: torch.Tensor | None = None
    read_cost: torch.Tensor | None = None
    read_buckets: torch.Tensor | None = None
    gate_mean: torch.Tensor | None = None


@dataclass
class ArmCausalLMOutput(CausalLMOutputWithPast):
    """Output of an ARM language model.

    Args:
        loss (`torch.Tensor`, *optional*): Cross-entropy; while training, plus the weighted balance loss and read cost.
        balance_loss, read_cost, gate_mean (`torch.Tensor`): Scalars, means over layers; 1 is an even balance.
        read_buckets (`torch.Tensor`): Buckets read, mean over layers and kv heads, (B, T).
    """

    balance_loss: torch.Tensor | None = None
    read_cost: torch.Tensor | None = None
    read_buckets: torch.Tensor | None = None
    gate_mean: torch.Tensor | None = None


class ArmPreTrainedMixin:
    """What every ARM model shares: its attention implementation and the initial values of the memory."""

    _keep_in_fp32_modules_strict = ("arm",)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ArmMemory):
            module.reset_parameters()

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        if attn_implementation not in (None, "arm"):
            logger.warning(
                f"attn_implementation={attn_implementation!r} is ignored: an ARM model always uses 'arm'. For exact "
                "attention over the same weights use `with full_attention(model):`."
            )
        return "arm"

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Always `"arm"`."""
        return "arm"

    def arm_stats(self) -> list[ArmStats]:
        """Statistics of each layer's last call, in order of the layers with memory."""
        memories = [module for module in self.modules() if isinstance(module, ArmMemory)]
        return [memory.stats for memory in memories if memory.stats is not None]


class ArmModelMixin(ArmPreTrainedMixin):
    """A backbone with memory. Padding may stand anywhere: real tokens of a row are moved to the front and back."""

    _attention: Callable[[ArmConfig, int], nn.Module]

    def __init__(self, config: ArmConfig):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = self._attention(config, index)
        self.rotary_emb = ArmRotary(self.rotary_emb, config.arm_memory_distance)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: ArmCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        hidden_states_to_keep: int = 0,
        **kwargs,
    ) -> ArmModelOutput:
        """Hidden states (B, T, D) of T new tokens.

        Without gradients a long input runs through the whole model in segments of `arm_segment` tokens, so that memory
        does not grow with T; `hidden_states_to_keep` then keeps only the last ones (0 for all).

        Args:
            input_ids (`torch.LongTensor`): (B, T).
            attention_mask (`torch.Tensor`, *optional*): 1 for real tokens, (B, tokens seen + T).
            position_ids (`torch.LongTensor`, *optional*): Positions for the rotation only, (B, T); by default real
                tokens count up. The memory's order is that of arrival.
            cache (`ArmCache`, *optional*): Memory to go on with.
            inputs_embeds (`torch.Tensor`, *optional*): (B, T, D) instead of `input_ids`.
            use_cache (`bool`, *optional*): Make and return an [`ArmCache`]; never while training.
            hidden_states_to_keep (`int`, defaults to 0): Last positions to return.
            **kwargs: As for the backbone, for example `output_hidden_states`.

        Returns:
            [`ArmModelOutput`].

        Raises:
            ValueError: Another kind of cache, a cache of other settings or batch size, a mask that is not 2-D or not
            as
                long as all tokens, packed sequences, attentions of more than one token.
        """
        if self.config._attn_implementation != "arm":
            return super().forward(
                input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache=use_cache, **kwargs
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        source = input_ids if inputs_embeds is None else inputs_embeds
        length = source.shape[1]
        training = self.training and torch.is_grad_enabled()
        use_cache = self.config.use_cache if use_cache is None else use_cache
        check_inputs(self.config, source, attention_mask, position_ids, cache, kwargs)
        wanted = cache is not None or (use_cache and not training)
        split = length > self.config.arm_segment and not torch.is_grad_enabled() and not self._wants_layers(kwargs)
        if cache is None and (wanted or split):
            cache = ArmCache(self.config)
        if length == 0:
            hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return ArmModelOutput(last_hidden_state=hidden, cache=cache)
        if position_ids is None and attention_mask is not None:
            position_ids = real_positions(attention_mask)[:, -length:]
        elif position_ids is None and cache is not None:
            position_ids = cache.next_positions(length)
        rows = PackedRows(attention_mask, length)
        attention_mask = rows.valid
        source, position_ids = rows.pack(source), rows.pack(position_ids)

        if not torch.compiler.is_compiling():
            for memory in self._memories():
                memory.stats = None
        size = self.config.arm_segment if split else length
        parts, statistics = [], []
        for start in range(0, length, size):
            piece = slice(start, start + size)
            output = super().forward(
                attention_mask=None if attention_mask is None else attention_mask[:, piece],
                position_ids=None if position_ids is None else position_ids[:, piece],
                cache=cache,
                inputs_embeds=self.embed_tokens(source[:, piece]) if inputs_embeds is None else source[:, piece],
                use_cache=cache is not None,
                **kwargs,
            )
            parts.append(output.last_hidden_state)
            if not torch.compiler.is_compiling():
                statistics.append(_segment_statistics([m.stats for m in self._memories() if m.stats]))
            if split and hidden_states_to_keep and not rows.moved:
                parts = [torch.cat(parts, 1)[:, -hidden_states_to_keep:]]
        hidden = rows.unpack(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        if hidden_states_to_keep:
            hidden = hidden[:, -hidden_states_to_keep:]
        states = output.hidden_states
        return ArmModelOutput(
            last_hidden_state=hidden,
            cache=cache if wanted else None,
            hidden_states=None if states is None else tuple(rows.unpack(state) for state in states),
            attentions=output.attentions,
            **_summary(statistics, rows),
        )

    def _memories(self) -> list[nn.Module]:
        return [layer.self_attn.arm for layer in self.layers if layer.self_attn.arm is not None]

    def _wants_layers(self, kwargs: dict) -> bool:
        names = ("output_hidden_states", "output_attentions")
        return any(kwargs.get(name) or getattr(self.config, name, False) for name in names)


def _segment_statistics(stats: list[ArmStats]) -> dict[str, torch.Tensor]:
    """Means over layers and kv heads of what the layers did in one segment, and the number of its real tokens."""
    if not stats:
        return {}
    summary = {"read_buckets": torch.stack([s.read_buckets for s in stats]).float().mean((0, 2))}
    if stats[0].valid is not None:
        valid = stats[0].valid
        summary["tokens"] = valid.sum().float()
        summary["gate_mean"] = (torch.stack([s.gate for s in stats]).mean((0, 2)) * valid).sum()
    if stats[0].balance_loss is not None:  # a single token has none
        summary |= {
            name: torch.stack([getattr(s, name) for s in stats]).mean() for name in ("balance_loss", "read_cost")
        }
    return summary


def _summary(segments: list[dict[str, torch.Tensor]], rows: PackedRows) -> dict[str, torch.Tensor]:
    """The fields of [`ArmModelOutput`] from the segments' statistics."""
    if not segments or not segments[0]:
        return {}
    summary = {"read_buckets": rows.unpack(torch.cat([part["read_buckets"] for part in segments], -1))}
    single = len(segments) == 1 and "balance_loss" not in segments[0]
    if single:
        return summary
    total = sum(part["tokens"] for part in segments).clamp_min(1)
    summary["gate_mean"] = sum(part["gate_mean"] for part in segments) / total
    scanned = [part for part in segments if "balance_loss" in part]
    if scanned:
        weight = sum(part["tokens"] for part in scanned).clamp_min(1)
        for name in ("balance_loss", "read_cost"):
            summary[name] = sum(part["tokens"] / weight * part[name] for part in scanned)
    return summary


class ArmForCausalLM(ArmPreTrainedMixin):
    """A language model with a routed memory of fixed size in place of the growing cache.

    `ArmForCausalLM.from_pretrained` loads any ARM folder; the concrete classes are [`ArmLlamaForCausalLM`],
    [`ArmQwen2ForCausalLM`], [`ArmQwen3ForCausalLM`] and [`ArmMistralForCausalLM`], which `AutoModelForCausalLM` finds
    too. [`convert_to_arm`] makes one from a backbone.

    Example:
        ```python
        import torch

        from hf_models import ArmForCausalLM
        from hf_pipelines import hub

        model = ArmForCausalLM.from_pretrained(hub.repo("arm-recall"))
        out = model.generate(torch.tensor([[3, 152, 128]]), max_new_tokens=2, return_dict_in_generate=True)
        print(out.cache.nbytes())
        ```
    """

    _model: type[PreTrainedModel]
    _backbone: type[PreTrainedModel]

    def __init__(self, config: ArmConfig):
        super(self._backbone, self).__init__(config)  # the backbone's head, over a model with memory
        self.model = self._model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.read_cost_scale = 1.0  # ramped by the trainer
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load an ARM folder or Hub repo; called on `ArmForCausalLM` itself it finds the right class."""
        if cls is ArmForCausalLM:
            return AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: ArmCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> ArmCausalLMOutput:
        """Logits (B, T, V) of T new tokens; arguments and errors as in [`ArmModelMixin.forward`].

        Args:
            input_ids (`torch.LongTensor`): (B, T).
            attention_mask (`torch.Tensor`, *optional*): 1 for real tokens, (B, tokens seen + T).
            position_ids (`torch.LongTensor`, *optional*): Positions for the rotation, (B, T).
            cache (`ArmCache`, *optional*): Memory to go on with.
            inputs_embeds (`torch.Tensor`, *optional*): (B, T, D) instead of `input_ids`.
            use_cache (`bool`, *optional*): Make and return an [`ArmCache`]; never while training.
            labels (`torch.LongTensor`, *optional*): (B, T), shifted inside, −100 ignored.
            logits_to_keep (`int` or `torch.Tensor`, defaults to 0): Last positions, or their indices; 0 for all.
            **kwargs: As for the backbone, for example `output_hidden_states`.
        """
        if self.config._attn_implementation != "arm":
            return super().forward(
                input_ids,
                attention_mask,
                position_ids,
                cache,
                inputs_embeds,
                labels,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
        return_dict = kwargs.pop("return_dict", None)
        keep = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            hidden_states_to_keep=keep,
            **{name: value for name, value in kwargs.items() if name != "num_items_in_batch"},
        )
        hidden = outputs.last_hidden_state
        if not isinstance(logits_to_keep, int):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep > 0:
            hidden = hidden[:, -logits_to_keep:]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if self.training and outputs.balance_loss is not None:
                loss = loss + self.config.arm_balance_coef * outputs.balance_loss
                loss = loss + self.config.arm_read_coef * self.read_cost_scale * outputs.read_cost
        names = ("cache", "hidden_states", "attentions", "balance_loss", "read_cost", "read_buckets", "gate_mean")
        output = ArmCausalLMOutput(loss=loss, logits=logits, **{name: getattr(outputs, name) for name in names})
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return output if return_dict else output.to_tuple()

    # ---- generation ----

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        full = self.config._attn_implementation != "arm"
        if full or model_kwargs.get("cache") is not None or generation_config.use_cache is False:
            if not full and generation_config.cache_implementation is not None:
                _refuse_implementation(generation_config.cache_implementation)
            return super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        if generation_config.cache_implementation is not None:
            _refuse_implementation(generation_config.cache_implementation)
        model_kwargs["cache"] = ArmCache(self.config)
        if generation_config.is_assistant:
            model_kwargs["cache"].activate_past_recording()
        return None

    def create_masks_for_generate(self, config, inputs_embeds, attention_mask, cache=None, **kwargs):
        """The 2-D mask as it is: the memory never needs a square one."""
        if self.config._attn_implementation != "arm":
            from transformers.masking_utils import create_masks_for_generate

            names = ("position_ids", "block_sequence_ids")
            kwargs = {name: kwargs[name] for name in names if name in kwargs}
            return create_masks_for_generate(config, inputs_embeds, attention_mask, cache, **kwargs)
        if attention_mask is not None:
            torch._dynamo.maybe_mark_dynamic(attention_mask, 1)  # grows by one per step: one graph for all lengths
        return attention_mask


def _refuse_implementation(name: str) -> None:
    raise ValueError(
        f"cache_implementation={name!r} does not fit an ARM model, whose memory is its cache: "
        "pass ArmCache(model.config) or leave cache unset."
    )


# ---- the four backbones --------------------------------------------------------------------------


class ArmLlamaModel(ArmModelMixin, LlamaModel):
    """Llama with memory, without a head."""

    config_class = ArmLlamaConfig
    _attention = ArmLlamaAttention


class ArmQwen2Model(ArmModelMixin, Qwen2Model):
    """Qwen2 with memory, without a head."""

    config_class = ArmQwen2Config
    _attention = ArmQwen2Attention


class ArmQwen3Model(ArmModelMixin, Qwen3Model):
    """Qwen3 with memory, without a head."""

    config_class = ArmQwen3Config
    _attention = ArmQwen3Attention


class ArmMistralModel(ArmModelMixin, MistralModel):
    """Mistral with memory, without a head."""

    config_class = ArmMistralConfig
    _attention = ArmMistralAttention


class ArmLlamaForCausalLM(ArmForCausalLM, LlamaForCausalLM):
    """Llama with memory; see [`ArmForCausalLM`]."""

    config_class = ArmLlamaConfig
    _model, _backbone = ArmLlamaModel, LlamaForCausalLM


class ArmQwen2ForCausalLM(ArmForCausalLM, Qwen2ForCausalLM):
    """Qwen2 with memory; see [`ArmForCausalLM`]."""

    config_class = ArmQwen2Config
    _model, _backbone = ArmQwen2Model, Qwen2ForCausalLM


class ArmQwen3ForCausalLM(ArmForCausalLM, Qwen3ForCausalLM):
    """Qwen3 with memory; see [`ArmForCausalLM`]."""

    config_class = ArmQwen3Config
    _model, _backbone = ArmQwen3Model, Qwen3ForCausalLM


class ArmMistralForCausalLM(ArmForCausalLM, MistralForCausalLM):
    """Mistral with memory; see [`ArmForCausalLM`]."""

    config_class = ArmMistralConfig
    _model, _backbone = ArmMistralModel, MistralForCausalLM


MODELS = {
    ArmLlamaConfig: (ArmLlamaModel, ArmLlamaForCausalLM),
    ArmQwen2Config: (ArmQwen2Model, ArmQwen2ForCausalLM),
    ArmQwen3Config: (ArmQwen3Model, ArmQwen3ForCausalLM),
    ArmMistralConfig: (ArmMistralModel, ArmMistralForCausalLM),
}
