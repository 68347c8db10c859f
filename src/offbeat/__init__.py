"""offbeat: reinforcement-learning post-training in which generation and training overlap."""

__version__ = "0.1.0"
