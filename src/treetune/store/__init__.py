"""Writes and reads a run's files: files that are whole or not there at all, checksums, and journals that only
grow."""
