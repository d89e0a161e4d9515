"""Tiny random models of families of Mixture-of-Experts models in transformers."""

import numpy as np
import torch
import transformers as hf

from routed.trace import hooks

SMALL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
#: Two of eight experts, under the names that families have for them.
EIGHT = SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
GROUPS = SMALL | {
    "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1,
}  # fmt: skip
SCALED = GROUPS | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
DEEPSEEK = GROUPS | LATENT | {"first_k_dense_replace": 0}
SWITCH = {
    "vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2,
    "num_experts": 8, "expert_capacity": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
NLLB = {
    "vocab_size": 300, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_experts": 8,
    "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 6, "moe_eval_capacity_token_fraction": 0.1,
    "max_position_embeddings": 64,
}  # fmt: skip

#: Of models that read images too, which read text alone here.
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

#: Name -> (class of the config, its settings).
FAMILIES = {
    "afmoe": ("AfmoeConfig", EIGHT | {"num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 8}),
    "aria": ("AriaTextConfig", SMALL | {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "cohere2_moe": ("Cohere2MoeConfig", EIGHT | {"head_dim": 8, "num_shared_experts": 0}),
    "dbrx": ("DbrxConfig", {
        "vocab_size": 300, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "pad_token_id": 0,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 32},
    }),
    "deepseek_v2": ("DeepseekV2Config", DEEPSEEK | {"topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | {"first_k_dense_replace": 1}),
    "deepseek_v4": ("DeepseekV4Config", EIGHT | {"n_routed_experts": 8, "head_dim": 8}),
    "dots1": ("Dots1Config", SCALED | {"first_k_dense_replace": 1, "head_dim": 8}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", SMALL | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
    "exaone_moe": ("ExaoneMoeConfig", EIGHT | {"n_group": 4, "topk_group": 2, "num_shared_experts": 1, "head_dim": 8,
        "first_k_dense_replace": 1, "sliding_window": 16}),
    "flex_olmo": ("FlexOlmoConfig", EIGHT),
    "gemma4": ("Gemma4TextConfig", EIGHT | {"head_dim": 8, "global_head_dim": 8, "enable_moe_block": True,
        "top_k_experts": 2, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8,
        "sliding_window": 16}),
    "glm4_moe": ("Glm4MoeConfig", SCALED | {"first_k_dense_replace": 1, "head_dim": 8}),
    "gpt_oss": ("GptOssConfig", LOCAL | {"head_dim": 8}),
    "granitemoe": ("GraniteMoeConfig", LOCAL),
    "granitemoeshared": ("GraniteMoeSharedConfig", LOCAL | {"shared_intermediate_size": 16}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", EIGHT | {"moe_topk": 2, "head_dim": 8}),
    "hy_v3": ("HYV3Config", EIGHT | {"head_dim": 8, "num_shared_experts": 1}),
    "jamba": ("JambaConfig", EIGHT | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 1, "mamba_dt_rank": 4,
        "use_mamba_kernels": False, "num_hidden_layers": 4}),
    "jetmoe": ("JetMoeConfig", LOCAL | {"kv_channels": 8}),
    "lfm2_moe": ("Lfm2MoeConfig", EIGHT | {"num_dense_layers": 1, "use_expert_bias": True,
        "layer_types": ["conv", "full_attention"], "norm_topk_prob": True}),
    "llama4": ("Llama4TextConfig", LOCAL | {"head_dim": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 24, "attention_chunk_size": 64}),
    "glm4v_moe": ("Glm4vMoeConfig", {
        "text_config": SCALED | {"first_k_dense_replace": 1, "head_dim": 8, "rope_parameters": SECTIONS | {
            "partial_rotary_factor": 1.0}},
        "vision_config": VISION | {"image_size": 16},
    }),
    "longcat_flash": ("LongcatFlashConfig", SMALL | LATENT | {"num_layers": 1, "n_routed_experts": 8, "moe_topk": 2,
        "zero_expert_num": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 24, "head_dim": 4}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", SCALED | {"head_dim": 8, "v_head_dim": 8, "swa_head_dim": 8,
        "swa_v_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}),
    "minimax": ("MiniMaxConfig", LOCAL | {"head_dim": 8, "block_size": 16}),
    "minimax_m2": ("MiniMaxM2Config", LOCAL | {"head_dim": 8}),
    "mixtral": ("MixtralConfig", LOCAL),
    "nemotron_h": ("NemotronHConfig", SCALED | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "moe",
        "attention"], "moe_shared_expert_intermediate_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 4, "n_groups": 2, "head_dim": 8, "use_mamba_kernels": False}),
    "nllb": ("NllbMoeConfig", NLLB),
    "olmoe": ("OlmoeConfig", EIGHT | {"num_experts_per_tok": 4}),
    "phimoe": ("PhimoeConfig", LOCAL),
    "qwen2": ("Qwen2MoeConfig", EIGHT | {"shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3MoeConfig", EIGHT | {"head_dim": 8, "num_hidden_layers": 3, "mlp_only_layers": [0]}),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", {
        "text_config": EIGHT | {"head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "rope_parameters": SECTIONS},
        "vision_config": VISION | {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0]},
    }),
    "qwen3_next": ("Qwen3NextConfig", EIGHT | {"shared_expert_intermediate_size": 16, "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}),
    "solar_open": ("SolarOpenConfig", SCALED | {"head_dim": 8}),
    "switch": ("SwitchTransformersConfig", SWITCH),
}  # fmt: skip


#: Families whose experts receive something else than (experts, weights), so that `trace.readers` has a reader of each.
SPECIAL = ("jetmoe", "llama4", "nllb", "switch")
#: Families with routers whose choices do not follow their scores: the first layers of DeepSeek-V4 are hashes.
NO_SURGERY = ("deepseek_v4",)
#: Families of models that predict the next token, and whose routers can be replaced.
CAUSAL = tuple(family for family in FAMILIES if family not in ("nllb", "switch", *NO_SURGERY))
ROWS = [*np.random.default_rng(0).integers(3, 290, (12, 16))]


def make(family, dtype=torch.float32):
    """Returns a random model of a family, with routers and choice biases that tell experts apart."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(hf, kind)(**settings)
    kinds = hf.AutoModelForCausalLM, hf.AutoModelForImageTextToText, hf.AutoModelForSeq2SeqLM
    model = next(kind for kind in kinds if type(config) in kind._model_mapping).from_config(config)
    with torch.no_grad():
        for router in hooks.routers_of(model).values():
            for parameter in router.module.parameters():
                parameter.normal_(std=0.5)
            if (bias := hooks.choice_bias(router)) is not None:
                bias.normal_(std=0.3)
        for name, tensor in model.named_parameters():
            if ".experts." in name or "put_linear." in name:
                tensor.normal_(std=0.3)  # so that it matters which experts are taken
        for name, tensor in model.named_buffers():
            if name.endswith("tid2eid"):  # the hash of DeepSeek-V4: experts of a token id
                tensor.copy_(torch.rand(len(tensor), 8).topk(tensor.shape[1]).indices)
    return model.to(dtype).eval()


def inputs_of(model, rows):
    """Returns the arguments of a model for rows of token ids."""
    ids = torch.tensor(np.stack(rows))
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}
    shifted = ids.roll(1, 1)
    shifted[:, 0] = model.config.decoder_start_token_id
    return {"input_ids": ids, "decoder_input_ids": shifted}
