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
from .probe import ProbeReport, probe
from .shards import shard_views
from .support import support_rows, support_table

__all__ = [
    "FAMILIES",
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
    "NoAttentionFound",
    "Output",
    "ProbeReport",
    "Projection",
    "Sections",
    "Separate",
    "find_attention",
    "probe",
    "register_layout",
    "shard_views",
    "support_rows",
    "support_table",
]
