"""Tiny, randomly initialised text-to-image pipelines: the real classes of diffusers at a few thousand parameters."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)


def _vae(latent_channels: int, **extra) -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5035,
        shift_factor=0.0609,
        **extra,
    )


def tiny_sd3(**scheduler) -> tuple[StableDiffusion3Pipeline, dict[str, Any]]:
    """SD3, 32×32 pixels, guidance 3 in one doubled batch."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, **scheduler),
        vae=_vae(4),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    generator = torch.Generator().manual_seed(1)
    embeds = {
        "prompt_embeds": torch.randn(2, 7, 32, generator=generator),
        "negative_prompt_embeds": torch.randn(2, 7, 32, generator=generator),
        "pooled_prompt_embeds": torch.randn(2, 64, generator=generator),
        "negative_pooled_prompt_embeds": torch.randn(2, 64, generator=generator),
    }
    return pipe, {**embeds, "guidance_scale": 3.0, "height": 16, "width": 16}


def tiny_flux(**scheduler) -> tuple[FluxPipeline, dict[str, Any]]:
    """FLUX.1 with distilled guidance; add `negative_*` embeddings and `true_cfg_scale` for two calls a step."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )
    pipe = FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **scheduler),
        vae=_vae(4),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )
    generator = torch.Generator().manual_seed(1)
    embeds = {
        "prompt_embeds": torch.randn(2, 7, 32, generator=generator),
        "pooled_prompt_embeds": torch.randn(2, 32, generator=generator),
    }
    return pipe, {**embeds, "guidance_scale": 3.5, "height": 16, "width": 16}


def tiny_flux2(**scheduler) -> tuple[Flux2Pipeline, dict[str, Any]]:
    """FLUX.2 with batch-normalised, packed latents placed by position ids."""
    torch.manual_seed(0)
    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        timestep_guidance_channels=256,
        axes_dims_rope=[4, 4, 4, 4],
    )
    vae = AutoencoderKLFlux2(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, vae.bn.running_mean.numel()))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, vae.bn.running_var.numel()))
    pipe = Flux2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **scheduler),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
    )
    embeds = {"prompt_embeds": torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))}
    return pipe, {**embeds, "guidance_scale": 4.0, "height": 16, "width": 16}


def tiny_zimage(**scheduler) -> tuple[ZImagePipeline, dict[str, Any]]:
    """Z-Image, whose network takes 1 − σ and whose output is negated; guidance in one doubled list."""
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[64, 64, 64],
    )
    with torch.no_grad():  # pad tokens are allocated empty
        for name, parameter in transformer.named_parameters():
            if "pad_token" in name:
                parameter.zero_()
    pipe = ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, **scheduler),
        vae=_vae(4),
        text_encoder=None,
        tokenizer=None,
    )
    generator = torch.Generator().manual_seed(1)
    embeds = {
        "prompt_embeds": [torch.randn(7, 16, generator=generator) for _ in range(2)],
        "negative_prompt_embeds": [torch.randn(7, 16, generator=generator) for _ in range(2)],
    }
    return pipe, {**embeds, "guidance_scale": 3.0, "height": 16, "width": 16}


def tiny_qwen(**scheduler) -> tuple[QwenImagePipeline, dict[str, Any]]:
    """Qwen-Image with a video VAE; its velocity adapter is not written, so it serves K = 1 alone."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )
    pipe = QwenImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **scheduler),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
    )
    embeds = {
        "prompt_embeds": torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)),
        "prompt_embeds_mask": torch.ones(2, 7, dtype=torch.long),
    }
    return pipe, {**embeds, "height": 16, "width": 16}


def tiny_flux_with_text() -> FluxPipeline:
    """Tiny FLUX with real (random) CLIP and T5 encoders and tokenizers built from a handful of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        PreTrainedTokenizerFast,
        T5Config,
        T5EncoderModel,
    )

    words = ["<pad>", "<unk>", "</s>", "a", "house", "red", "blurry"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=8
    )
    torch.manual_seed(0)
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=7,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            eos_token_id=2,
            bos_token_id=2,
            pad_token_id=0,
        )
    )
    t5 = T5EncoderModel(T5Config(vocab_size=7, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2))
    base, _ = tiny_flux()
    base.register_modules(
        text_encoder=clip.eval(), tokenizer=tokenizer, text_encoder_2=t5.eval(), tokenizer_2=tokenizer
    )
    base.tokenizer_max_length = 8
    base.set_progress_bar_config(disable=True)
    return base


TINY_PIPELINES = {"sd3": tiny_sd3, "flux": tiny_flux, "flux2": tiny_flux2, "zimage": tiny_zimage}
