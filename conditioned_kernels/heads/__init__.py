"""Where the attention heads of a model are."""

from .discover import AttentionLayer, Discovery, NoAttentionFound, find_attention, register_layout
from .families import FAMILIES, Family
from .layout import (
    Blocked,
    Choose,
    Grouped,
    HeadView,
    IfPresent,
    Interleaved,
    Joined,
    LayoutError,
    Output,
    Projection,
    Sections,
    Separate,
)
from .mechanics import MECHANICS, Mechanics, attention_heads
from .probe import ProbeReport, probe
from .shards import from_shard, shard_views
from .support import support_rows, support_table

__all__ = [
    "FAMILIES",
    "MECHANICS",
    "AttentionLayer",
    "Blocked",
    "Choose",
    "Discovery",
    "Family",
    "Grouped",
    "HeadView",
    "IfPresent",
    "Interleaved",
    "Joined",
    "LayoutError",
    "Mechanics",
    "NoAttentionFound",
    "Output",
    "ProbeReport",
    "Projection",
    "Sections",
    "Separate",
    "attention_heads",
    "find_attention",
    "from_shard",
    "probe",
    "register_layout",
    "shard_views",
    "support_rows",
    "support_table",
]
