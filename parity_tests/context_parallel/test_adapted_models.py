"""Models of transformers inside a context, unmodified: two that see images, two with an encoder, one with a window."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from parity_tests.parallelizer.families import Float64Throughout
from parity_tests.parallelizer.training import PROMISED, deviation
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.context_parallel import adapt_model_to_context, create_context_parallel_ctx, make_cp_batch_and_ctx

ROWS, SIZE, IMAGE = 2, 16, 31
TEXT = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=32,
    max_position_embeddings=64,
)
CODER = dict(
    vocab_size=32,
    d_model=16,
    encoder_layers=1,
    decoder_layers=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
IDS = torch.arange(ROWS * SIZE).view(ROWS, SIZE) * 7 % 29
WITH_IMAGES = IDS.clone()
WITH_IMAGES[0, 3:7], WITH_IMAGES[1, 9:13] = IMAGE, IMAGE  # in chunks of different ranks
RIGHT_PADDED = torch.ones(ROWS, SIZE, dtype=torch.int64)
RIGHT_PADDED[1, 13:] = 0


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@dataclass(frozen=True)
class Family:
    """A small random model, its inputs, and which of its modules a context leaves alone or shards."""

    model: Callable[[], Any]
    inputs: dict[str, Any]
    local: list[str]
    sharded: list[str]
    weights: torch.Tensor = field(default_factory=lambda: numbers(ROWS, SIZE, 32))


def llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    vision = dict(depth=1, embed_dim=8, hidden_size=16, num_heads=2, patch_size=2, mlp_ratio=1, temporal_patch_size=1)
    ids = dict(image_token_id=IMAGE, vision_start_token_id=30, video_token_id=29)
    text = {**TEXT, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Qwen2VLForConditionalGeneration(config)


FAMILIES = {
    "llava": Family(
        llava,
        dict(input_ids=WITH_IMAGES, pixel_values=numbers(2, 3, 8, 8), attention_mask=RIGHT_PADDED),
        ["model.vision_tower"],
        ["model.language_model.layers.*"],
        numbers(ROWS, SIZE, 32) * RIGHT_PADDED[..., None],
    ),
    "qwen2_vl": Family(
        qwen2_vl,
        dict(
            input_ids=WITH_IMAGES,
            pixel_values=numbers(32, 12),
            image_grid_thw=torch.tensor([[1, 4, 4]] * 2),
            mm_token_type_ids=(WITH_IMAGES == IMAGE).int(),
        ),
        ["model.visual"],
        ["model.language_model.layers.*"],
    ),
    "bart": Family(
        lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(**CODER, dropout=0.0, max_position_embeddings=32)
        ),
        dict(input_ids=IDS[:, :5], decoder_input_ids=IDS),
        ["model.encoder", "*.encoder_attn"],
        ["model.decoder.layers.*"],
    ),
    "whisper": Family(
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                **CODER, dropout=0.0, max_source_positions=8, max_target_positions=32, num_mel_bins=4
            )
        ),
        dict(input_features=numbers(ROWS, 4, 16), decoder_input_ids=IDS),
        ["model.encoder", "*.encoder_attn"],
        ["model.decoder.layers.*"],
    ),
    "mistral": Family(
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**TEXT, sliding_window=5)),
        dict(input_ids=IDS),
        [],
        ["model.layers.*"],
    ),
}


def built(family) -> nn.Module:
    """The model, all of whose sums are in float64: where transformers asks for float32, one rounding hides another."""
    torch.manual_seed(0)
    model = family.model().double().eval()
    forward = model.forward

    def wide(*args, **kwargs):
        with Float64Throughout():
            return forward(*args, **kwargs)

    model.forward = wide
    return model


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@cache
def alone(name):
    """Logits and gradients of one device."""
    family = FAMILIES[name]
    model = built(family)
    logits = model(**family.inputs, use_cache=False).logits
    (logits * family.weights).sum().backward()
    return logits.detach(), gradients(model)


def judge(name, shards, layouts, summed):
    """The deviation of each shard from its rows of one device, and of the sum of each gradient over cp."""
    logits, expected = alone(name)
    real = FAMILIES[name].weights.any(-1, keepdim=True)
    assert summed.keys() == expected.keys()
    # A bias of keys moves all logits of a query alike: its gradient is 0, and the computed value is rounding.
    deviations = {key: deviation(summed[key], x) for key, x in expected.items() if not key.endswith("k_proj.bias")}
    for rank, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
        rows = layout.shard(logits * real, 1)
        deviations[f"logits of rank {rank}"] = deviation(shard * layout.shard(real, 1), rows)
    return {key: size for key, size in deviations.items() if not size <= PROMISED}


def collect(name, results):
    shards, layouts, of_ranks = zip(*results, strict=True)
    summed = {key: sum(each[key] for each in of_ranks) for key in of_ranks[0]}
    return judge(name, shards, layouts, summed)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_match_one_device(name):
    """The model is called with the full sequence, and computes its positions and places of images itself."""
    family = FAMILIES[name]

    def body(mesh, case):
        model = built(family)
        adapt_model_to_context(model, local=family.local, sharded=family.sharded)
        weights = family.weights.clone()
        context = create_context_parallel_ctx(mesh.device_mesh["cp"], [weights], [1], set(), "allgather")
        with context as entered:
            logits = model(**family.inputs, use_cache=False).logits
            (logits * weights).sum().backward()
            return logits.detach(), entered.layout, gradients(model)

    assert collect(name, run(body, CaseSpec(scheme="adapted", mesh={"cp": 2})).results) == {}


def test_layers_that_backward_recomputes_are_left_alone_too():
    """Backward computes each layer again, the encoder's layers too, outside of the encoder's own forward."""
    family = FAMILIES["bart"]

    def body(mesh, case):
        model = built(family).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        adapt_model_to_context(model, local=family.local, sharded=family.sharded)
        weights = family.weights.clone()
        context = create_context_parallel_ctx(mesh.device_mesh["cp"], [weights], [1], set(), "alltoall")
        with context as entered:
            logits = model(**family.inputs, use_cache=False).logits
            (logits * weights).sum().backward()
            return logits.detach(), entered.layout, gradients(model)

    assert collect("bart", run(body, CaseSpec(scheme="adapted", mesh={"cp": 2})).results) == {}


def test_a_batch_that_is_sharded_already():
    """Its positions jump between chunks, of which transformers makes a mask of packed sequences: the hook drops it."""
    family = FAMILIES["mistral"]

    def body(mesh, case):
        model = built(family)
        batch = {**family.inputs, "weights": family.weights}
        factory, shards = make_cp_batch_and_ctx(mesh.device_mesh["cp"], batch)
        with factory():
            call = dict(input_ids=shards["input_ids"], position_ids=shards["position_ids"], use_cache=False)
            with pytest.raises(ValueError, match="adapt_model_to_context drops a Hugging Face model's masks"):
                model(**call)
            adapt_model_to_context(model)
            logits = model(**call).logits
            (logits * shards["weights"]).sum().backward()
            return logits.detach(), factory.layout, gradients(model)

    assert collect("mistral", run(body, CaseSpec(scheme="adapted", mesh={"cp": 2})).results) == {}


def test_a_mask_with_another_rule_is_rejected():
    """Left padding, which causal attention would see."""
    family = FAMILIES["llava"]

    def body(mesh, case):
        model = built(family)
        adapt_model_to_context(model, local=family.local, sharded=family.sharded)
        inputs = {**family.inputs, "attention_mask": RIGHT_PADDED.flip(1)}
        context = create_context_parallel_ctx(mesh.device_mesh["cp"], [torch.zeros(SIZE)], [0], set(), "allgather")
        with context, pytest.raises(ValueError, match=r"layers.0.self_attn: attention_mask .* is not the causal rule"):
            model(**inputs, use_cache=False)

    run(body, CaseSpec(scheme="adapted", mesh={"cp": 2}))
