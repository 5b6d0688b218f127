"""Answers of several turns, between which an environment speaks."""
