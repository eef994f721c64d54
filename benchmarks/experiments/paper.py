"""The paper's own results (Saratchandran and Lucey, ICLR 2026), to stand beside ours."""

PAPER_RESULTS = (
    ("ViT-B, ImageNet-1k top-1", "80.3", "80.5", "81.5", "211 of 300"),
    ("DeiT-B, ImageNet-1k top-1", "81.6", "81.6", "82.7", "206 of 300"),
    ("Swin-B, ImageNet-1k top-1", "83.4", "83.5", "84.6", "321 of 400"),
    ("XCiT-M, ImageNet-1k top-1", "82.6", "82.6", "83.5", "318 of 400"),
    ("DaViT-B, ImageNet-1k top-1", "84.3", "84.4", "85.3", ""),
    ("Crammed BERT, GLUE average", "78.6", "78.9", "79.6", ""),
    ("Nyströmformer, LRA Text", "63.8", "", "64.9", ""),
)
"""(model and task, default, mimetic, conditioned, epochs at which conditioned has the default's final accuracy)."""
