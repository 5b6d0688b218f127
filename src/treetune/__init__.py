"""Treetune: research experiments in reinforcement learning of language-model reasoning."""

__version__ = "0.1.0"
