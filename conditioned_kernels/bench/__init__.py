"""The benchmark suite: every claim side by side with its peer, and its distance to the machine's limit.

``suite.py`` lists what is measured, ``peers.py`` what it is measured against, ``shapes.py`` the real models the sizes
come from, ``machine.py`` the limits, ``measure.py`` how; ``growth.py`` fits time against size.
"""
