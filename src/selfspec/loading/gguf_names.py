"""What GGUF files call the modules of transformers' models, for all families in one table."""

import re

from selfspec.loading.gguf_file import XIELU

_PLACES = {
    "model": "transformer gpt_neox backbone",
    "self_attn": "attn attention self_attention",
    "mixer": "mamba linear_attn",
    "mlp": "feed_forward block_sparse_moe ffn",
}
"""What families call the parts that most call by the first name."""

_MODULES = {
    "token_embd": "model.embed_tokens model.wte model.embed_in model.word_embeddings model.embeddings",
    "token_embd_norm": "model.word_embeddings_layernorm model.embedding_norm",
    "position_embd": "model.wpe",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "output_norm": "model.norm model.ln_f model.norm_f model.final_layer_norm model.final_layernorm",
    "output": "lm_head",
    "attn_norm": "input_layernorm attention_layernorm operator_norm ln_1 norm_1 ln_mlp norm",
    "attn_norm_2": "ln_attn",
    "attn_q": "self_attn.q_proj mixer.q_proj",
    "attn_k": "self_attn.k_proj mixer.k_proj",
    "attn_v": "self_attn.v_proj mixer.v_proj",
    "attn_qkv": "self_attn.qkv_proj self_attn.query_key_value self_attn.c_attn self_attn.Wqkv mixer.in_proj_qkv",
    "attn_output": "self_attn.o_proj self_attn.out_proj self_attn.c_proj self_attn.dense mixer.o_proj",
    "attn_gate": "self_attn.gate_proj self_attn.g_proj mixer.in_proj_z",
    "attn_sinks": "self_attn.sinks",
    "attn_q_norm": "self_attn.q_norm self_attn.query_layernorm self_attn.q_layernorm self_attn.q_layernorm.norms",
    "attn_k_norm": "self_attn.k_norm self_attn.key_layernorm self_attn.k_layernorm self_attn.k_layernorm.norms",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm pre_feedforward_layernorm feedforward_layernorm pre_mlp_layernorm "
    "pre_ff_layernorm ln_2 norm_2 ffn_norm",
    "ffn_gate": "mlp.gate_proj mlp.w1",
    "ffn_up": "mlp.up_proj mlp.gate_up_proj mlp.c_fc mlp.fc1 mlp.w3 mlp.dense_h_to_4h mixer.up_proj",
    "ffn_down": "mlp.down_proj mlp.c_proj mlp.fc2 mlp.w2 mlp.dense_4h_to_h mixer.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm post_mlp_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "mlp.gate mlp.router mlp.gate.wg mlp.router.gate router.proj mixer.gate",
    "ffn_gate_inp.scale": "router.scale",
    "exp_probs_b": "mlp.gate.e_score_correction mlp.gate.moe_statics.e_score_correction mlp.e_score_correction "
    "mlp.expert mixer.gate.e_score_correction",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj experts.gate_up_proj",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj experts.down_proj mixer.experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_up_shexp": "shared_mlp.input_linear",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj mixer.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj mixer.shared_expert.down_proj shared_mlp.output_linear",
    "ssm_in": "mixer.in_proj mixer.in_proj_qkvz",
    "ssm_ba": "mixer.in_proj_ba",
    "ssm_beta": "mixer.in_proj_b",
    "ssm_alpha": "mixer.in_proj_a",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt mixer.dt_proj",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    **{f"ssm_{name}_norm": f"mixer.{name}_layernorm" for name in ("dt", "b", "c")},
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    **{f"xielu.{name}": f"mlp.act_fn.{name}" for name in XIELU},
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Names of modules in transformers by those in GGUF; a row of the families has those that differ."""

_TENSORS = {module: name for name, modules in _MODULES.items() for module in modules.split()}
_PLACE = re.compile("|".join(rf"^(?P<{place}>{'|'.join(others.split())})\." for place, others in _PLACES.items()))
_SHARED = re.compile(r"(?<=^mlp\.)shared_(?:experts|mlp)\.|(?<=^mixer\.)shared_experts\.")


def tensor_of(module: str) -> str | None:
    """The name in GGUF of a module of transformers; ``None`` for one that no file has."""
    usual = _PLACE.sub(lambda found: f"{found.lastgroup}.", module)
    return _TENSORS.get(_SHARED.sub("shared_expert.", usual))
