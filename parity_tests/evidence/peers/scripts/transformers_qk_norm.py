"""Gradients of Qwen3's q_norm under its own tensor plan, accumulated over micro-batches, beside one device."""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

config = Qwen3Config(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
config.update({"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False})
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(folder := tempfile.mkdtemp())
one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
two = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
batches = torch.arange(24).view(3, 2, 4)
for count in (1, 2, 3):
    for model in (one, two):
        model.zero_grad()
        for batch in batches[:count]:
            model(batch, labels=batch).loss.backward()
    pairs = [dict(model.named_parameters())["model.layers.0.self_attn.q_norm.weight"].grad for model in (one, two)]
    off = ((pairs[1] - pairs[0]).norm() / pairs[0].norm()).item()
    dist.get_rank() or print(f"{count} micro-batches: the gradient of q_norm is off by {off:.2f} of its norm")
dist.destroy_process_group()
