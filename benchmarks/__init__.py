"""Ratios against what torch offers, measured side by side; see measure.py."""
