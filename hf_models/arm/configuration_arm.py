"""Configurations of ARM models: a backbone's own configuration with the fields of the memory added."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

READ_POLICIES = ("all", "fixed", "adaptive")
MODES = ("trained", "training_free")
STATE_DTYPES = ("float32", "float64")


@strict
class ArmConfig(PreTrainedConfig):
    """The fields that Attention with Routed Memory adds to a backbone (arXiv 2609.24417).

    The concrete classes are [`ArmLlamaConfig`], [`ArmQwen2Config`], [`ArmQwen3Config`] and [`ArmMistralConfig`].

    | paper | argument | default |
    | --- | --- | --- |
    | branching b, router levels L, slots per bucket S (G = bᴸ buckets, M = G·S slots) | `arm_branching`,
    `arm_levels`, `arm_slots_per_bucket` | 4, 3, 4 |
    | exact window W, sink tokens | `arm_window`, `arm_sinks` | 64, 4 |
    | Gumbel temperature τ | `arm_tau` | 0.5 |
    | write gate γ | `arm_gate`, `arm_gate_bias`, `arm_write_threshold` | on, 0, 0.05 |
    | read width: Top-M against Top-(M+1), ε-greedy | `arm_read_policy`, `arm_epsilon`, `arm_read_coef` | adaptive,
    0.1, 0.05 |
    | balance loss | `arm_balance_coef` | 0.01 |

    Args:
        arm_branching (`int`, defaults to 4): Children per router node, b.
        arm_levels (`int`, defaults to 3): Router levels, L.
        arm_slots_per_bucket (`int`, defaults to 4): Slots per bucket, S.
        arm_window (`int`, defaults to 64): Last real tokens kept exactly, W. `window=1, sinks=0` is the paper's
            literal
            setting: the memory is the whole cache.
        arm_sinks (`int`, defaults to 4): First real tokens kept exactly.
        arm_tau (`float`, defaults to 0.5): Temperature of the Gumbel-Softmax over the slots of a bucket.
        arm_slot_prior (`float`, defaults to 8.0): Logit bonus β of the slot that is next in turn.
        arm_gate (`bool`, defaults to `True`): Whether the gate γ is learned; `False` writes every token fully (γ = 1).
        arm_gate_bias (`float`, defaults to 0.0): Initial bias of the gate.
        arm_write_threshold (`float`, defaults to 0.05): A token whose gate is below it is not written at all.
        arm_debias (`bool`, defaults to `True`): Whether reads divide by the mass of a slot, so that a first write is
            exact.
        arm_memory_distance (`int`, *optional*): Rotary distance Δ at which every slot appears; the window by default.
        arm_read_policy (`str`, defaults to `"adaptive"`): `"all"` reads every bucket, `"fixed"` the best
            `arm_read_buckets`, `"adaptive"` as many as the learned policy asks for.
        arm_read_buckets (`int`, *optional*): Buckets of the fixed policy; all by default.
        arm_min_read (`int`, defaults to 0): Fewest buckets that the adaptive policy reads.
        arm_epsilon (`float`, defaults to 0.1): Probability of flipping a stop/continue decision in training.
        arm_balance_coef (`float`, defaults to 0.01): Weight of the balance loss in the training loss.
        arm_read_coef (`float`, defaults to 0.05): Weight of the read cost in the training loss.
        arm_distill_coef (`float`, defaults to 0.0): Weight of the distillation loss of [`ArmTrainer`].
        arm_chunk (`int`, defaults to 16): Tokens per chunk C of the parallel scan; changes speed only.
        arm_segment (`int`, defaults to 512): Tokens per segment of a long input; changes memory and speed only.
        arm_state_dtype (`str`, defaults to `"float32"`): Type of the slots; small gates are lost in 16 bit.
        arm_layers (`list[int]`, *optional*): Layers with memory; the others keep full attention, and the cache then
            grows with the context. All layers by default.
        arm_mode (`str`, defaults to `"trained"`): `"training_free"` adds no parameter: fixed random buckets, merging
            of similar keys, running means.
        arm_seed (`int`, defaults to 0): Seed of the random directions of the training-free mode.
    """

    arm_branching: int = 4
    arm_levels: int = 3
    arm_slots_per_bucket: int = 4
    arm_window: int = 64
    arm_sinks: int = 4
    arm_tau: float | int = 0.5
    arm_slot_prior: float | int = 8.0
    arm_gate: bool = True
    arm_gate_bias: float | int = 0.0
    arm_write_threshold: float | int = 0.05
    arm_debias: bool = True
    arm_memory_distance: int | None = None
    arm_read_policy: str = "adaptive"
    arm_read_buckets: int | None = None
    arm_min_read: int = 0
    arm_epsilon: float | int = 0.1
    arm_balance_coef: float | int = 0.01
    arm_read_coef: float | int = 0.05
    arm_distill_coef: float | int = 0.0
    arm_chunk: int = 16
    arm_segment: int = 512
    arm_state_dtype: str = "float32"
    arm_layers: list[int] | None = None
    arm_mode: str = "trained"
    arm_seed: int = 0

    def __post_init__(self, **kwargs):
        if self.arm_memory_distance is None:
            self.arm_memory_distance = self.arm_window
        if self.arm_read_buckets is None and self.arm_branching >= 1 and self.arm_levels >= 1:
            self.arm_read_buckets = self.arm_buckets
        super().__post_init__(**kwargs)
        self._check_arm()

    @property
    def arm_buckets(self) -> int:
        """Number of buckets G = bᴸ."""
        return self.arm_branching**self.arm_levels

    @property
    def arm_slots(self) -> int:
        """Number of slots per kv head and layer, M = G·S."""
        return self.arm_buckets * self.arm_slots_per_bucket

    @property
    def arm_head_dim(self) -> int:
        """Dimension d of one attention head."""
        return getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads

    def has_memory(self, layer_idx: int) -> bool:
        """Whether a layer reads and writes a memory."""
        return self.arm_layers is None or layer_idx in self.arm_layers

    def _check_arm(self):
        for name in ("branching", "levels", "slots_per_bucket", "window", "chunk", "segment"):
            _require(self, f"arm_{name}", lambda value: value >= 1, "at least 1")
        for name in ("sinks", "memory_distance", "slot_prior", "balance_coef", "read_coef", "distill_coef"):
            _require(self, f"arm_{name}", lambda value: value >= 0, "at least 0")
        _require(self, "arm_tau", lambda value: value > 0, "above 0")
        _require(self, "arm_epsilon", lambda value: 0 <= value < 1, "in [0, 1)")
        _require(self, "arm_write_threshold", lambda value: 0 <= value < 1, "in [0, 1)")
        _require(self, "arm_read_policy", lambda value: value in READ_POLICIES, f"one of {READ_POLICIES}")
        _require(self, "arm_mode", lambda value: value in MODES, f"one of {MODES}")
        _require(self, "arm_state_dtype", lambda value: value in STATE_DTYPES, f"one of {STATE_DTYPES}")
        buckets = self.arm_buckets
        _require(self, "arm_read_buckets", lambda value: 1 <= value <= buckets, f"between 1 and G = {buckets}")
        _require(self, "arm_min_read", lambda value: 0 <= value <= buckets, f"between 0 and G = {buckets}")
        if self.arm_layers is not None:
            depth = self.num_hidden_layers
            bad = [index for index in self.arm_layers if not 0 <= index < depth]
            if bad or not self.arm_layers:
                raise ValueError(f"arm_layers={self.arm_layers} must name layers between 0 and {depth - 1}.")


def _require(config: ArmConfig, name: str, allowed, words: str) -> None:
    value = getattr(config, name)
    if not allowed(value):
        raise ValueError(f"{name}={value!r} must be {words}.")


ArmConfigMixin = ArmConfig
_KEYS_TO_IGNORE = ["cache", "past_key_values", "balance_loss", "read_cost", "read_buckets", "gate_mean"]


@strict
class ArmLlamaConfig(ArmConfig, LlamaConfig):
    """Configuration of [`ArmLlamaForCausalLM`]: every field of `LlamaConfig` and of [`ArmConfig`]."""

    model_type = "arm_llama"
    keys_to_ignore_at_inference = _KEYS_TO_IGNORE


@strict
class ArmQwen2Config(ArmConfig, Qwen2Config):
    """Configuration of [`ArmQwen2ForCausalLM`]: every field of `Qwen2Config` and of [`ArmConfig`]."""

    model_type = "arm_qwen2"
    keys_to_ignore_at_inference = _KEYS_TO_IGNORE


@strict
class ArmQwen3Config(ArmConfig, Qwen3Config):
    """Configuration of [`ArmQwen3ForCausalLM`]: every field of `Qwen3Config` and of [`ArmConfig`]."""

    model_type = "arm_qwen3"
    keys_to_ignore_at_inference = _KEYS_TO_IGNORE


@strict
class ArmMistralConfig(ArmConfig, MistralConfig):
    """Configuration of [`ArmMistralForCausalLM`]: every field of `MistralConfig` and of [`ArmConfig`]."""

    model_type = "arm_mistral"
    keys_to_ignore_at_inference = _KEYS_TO_IGNORE
    sliding_window: int | None = None
