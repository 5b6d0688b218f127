"""Graders at work: worker processes with a deadline that each can be killed at."""
