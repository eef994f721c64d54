"""Where the attention heads of a model are."""

from .discover import AttentionLayer, Discovery, NoAttentionFound, find_attention, register_layout
from .families import FAMILIES, Family
from .layout import HeadView, LayoutError, Projection
from .probe import ProbeReport, probe

__all__ = [
    "FAMILIES",
    "AttentionLayer",
    "Discovery",
    "Family",
    "HeadView",
    "LayoutError",
    "NoAttentionFound",
    "ProbeReport",
    "Projection",
    "find_attention",
    "probe",
    "register_layout",
]
