"""Does the initialization help training? Small models, many seeds, several learning rates, paired comparisons.

``python -m benchmarks.experiments run digits-vit`` trains what is missing, ``... report`` writes the tables.
"""
