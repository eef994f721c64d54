"""Where the attention heads of a model are."""

from .discover import AttentionLayer, Discovery, NoAttentionFound, find_attention, register_layout
from .families import FAMILIES, Family
from .layout import HeadView, LayoutError, Projection

__all__ = [
    "FAMILIES",
    "AttentionLayer",
    "Discovery",
    "Family",
    "HeadView",
    "LayoutError",
    "NoAttentionFound",
    "Projection",
    "find_attention",
    "register_layout",
]
