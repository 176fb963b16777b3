"""Vision and audio parts of a multimodal model, by the names that transformers' models give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn

Part = Literal["vision", "audio"]
VISION = {
    *("visual", "vision", "vision_tower", "vision_model", "vision_encoder", "vit_model", "image_encoder"),
    *("embed_vision", "vision_projector", "vit_large_projector", "mm_projector", "aligner"),
    *("multi_modal_projector", "multimodal_projector"),
}
AUDIO = {"audio_tower", "audio_encoder", "audio_model", "embed_audio", "audio_projector"}


def multimodal_parts(module: nn.Module) -> Iterator[tuple[Part, nn.Module]]:
    """The outermost modules inside a module with a name of a vision or an audio part."""
    for name, child in module.named_children():
        if name in VISION:
            yield "vision", child
        elif name in AUDIO:
            yield "audio", child
        else:
            yield from multimodal_parts(child)


def frozen_parts(model: nn.Module) -> list[nn.Module]:
    """The vision and audio parts of a model in which nothing is trained. A rank without images does not run them."""
    return [module for _, module in multimodal_parts(model) if not any(p.requires_grad for p in module.parameters())]
